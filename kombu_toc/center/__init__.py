"""The timeout center: what can be done with topics and messages. It knows nothing of Kombu."""
