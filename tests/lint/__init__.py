"""What switches in scripts and configurations do, by truths that do not use this tool."""
