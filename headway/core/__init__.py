"""The pure floor: decisions, with the time and the dice as arguments."""
