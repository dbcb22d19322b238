"""What clients and the server do between messages: local work, server steps, schedules, who takes part, losses."""
