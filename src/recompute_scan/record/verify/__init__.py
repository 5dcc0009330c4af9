"""The script again, unchanged and with the fix applied in memory."""
