"""What one lesson measures with."""
