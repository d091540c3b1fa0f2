"""Workers on Ray, on one machine or on a cluster."""
