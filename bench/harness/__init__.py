"""What every benchmark uses: rounds, figures, bars, reports, and the systems under test."""
