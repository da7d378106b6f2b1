"""Worker processes on this host: started, served, watched, ended.

The only folder that starts processes and opens sockets.
"""
