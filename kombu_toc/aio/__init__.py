"""The timeout center for asyncio."""
