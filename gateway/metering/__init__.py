"""What each request takes: reserved before, counted while, booked after it is answered."""
