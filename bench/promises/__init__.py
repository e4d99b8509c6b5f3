"""Is every promise kept, whatever fails?"""
