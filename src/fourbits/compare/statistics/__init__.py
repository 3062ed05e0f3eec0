"""What few seeds allow to conclude: confidence intervals, and races that end when they are decided."""
