"""Administrative calls and the values that they return."""
