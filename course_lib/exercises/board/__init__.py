"""`course board`: show a class at work on one page, from the files that learners share (`sharing`)."""
