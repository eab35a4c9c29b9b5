"""The Helm chart, rendered by the real `helm`."""
