# Sixteen threads that hand a number on by queues. GET / says who it is and how far they are.
import http.server, os, queue, threading, time

who = os.urandom(8).hex()
stations = [queue.Queue() for _ in range(16)]
rounds = 0


def work(i):
    global rounds
    while True:
        n = stations[i].get()
        if i == 0:
            rounds = n
            time.sleep(0.01)  # others may be in this sandbox
        stations[(i + 1) % len(stations)].put(n + 1)


for i in range(len(stations)):
    threading.Thread(target=work, args=(i,), daemon=True).start()
stations[0].put(1)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"{who} {rounds}".encode())

    def log_message(self, *args):
        pass


http.server.ThreadingHTTPServer(("", int(os.environ.get("PORT", 8080))), Handler).serve_forever()
