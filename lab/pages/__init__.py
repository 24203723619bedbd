"""The pages with recorded numbers, and the parts that all generated pages share."""
