"""The live view of `tidemark top`: figures, screen and keyboard."""
