"""Sessions, connections and the forms in which things travel."""
