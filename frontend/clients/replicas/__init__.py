"""Several engine processes of one model behind one client: `client.py` is the client, `routing.py`
decides which engine a request goes to, `requests.py` knows where each one is, `calls.py` joins the
engines' answers, `start.py` starts them and divides the machine between them.
"""
