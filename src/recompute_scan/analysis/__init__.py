"""The order of things: which readings a trace needs, the study, the answer, many ranks as one."""
