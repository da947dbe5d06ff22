"""What a store and its jobs look like, as one page: facts gathered from the store, charts, and the page that shows them."""
