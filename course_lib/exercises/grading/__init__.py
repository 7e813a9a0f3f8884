"""Grade a class: the judge in the parent process, submissions' code in a sandbox, JSON between them."""
