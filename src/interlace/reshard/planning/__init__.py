"""Plans what moves between two layouts, without torch."""
