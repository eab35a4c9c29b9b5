"""Links to storage: claims, exchanges, their events, placement and the topics learned over them."""
