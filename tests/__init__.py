"""Tests of Tidemark, by what they run: rules, one service, models, clusters, Spark, the chart."""
