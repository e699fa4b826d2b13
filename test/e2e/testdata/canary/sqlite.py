# A writer of a database that never rests, and keeps its last 500 rows. GET / says who it is and which row
# is the last, after another connection has found the database whole.
import http.server, os, sqlite3, threading, time

path = "/home/user/rows.db"
who = os.urandom(8).hex()


def write():
    db = sqlite3.connect(path)
    db.execute("pragma journal_mode=wal")
    db.execute("create table if not exists rows (n integer primary key, twice integer, filler blob)")
    n = 0
    while True:
        with db:
            for _ in range(5):
                n += 1
                db.execute("insert into rows values (?, ?, ?)", (n, 2 * n, os.urandom(1000)))
            db.execute("delete from rows where n <= ?", (n - 500,))
        time.sleep(0.01)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        status, text = 200, ""
        try:
            db = sqlite3.connect(path)
            verdict = db.execute("pragma integrity_check").fetchone()[0]
            rows, last, wrong = db.execute("select count(*), max(n), sum(twice != 2 * n) from rows").fetchone()
            if verdict != "ok" or rows != min(last, 500) or last % 5 or wrong:
                raise Exception(f"{verdict}: {rows} rows, the last {last}, {wrong} wrong")
            text = f"{who} {last}"
        except Exception as e:
            status, text = 500, str(e)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args):
        pass


threading.Thread(target=write, daemon=True).start()
http.server.ThreadingHTTPServer(("", int(os.environ.get("PORT", 8080))), Handler).serve_forever()
