"""From a CSV file to a served prediction: train on a table, load the run, and answer requests over HTTP.

python examples/csv_to_served_prediction.py     # writes flats.csv, a run folder and csv_to_served_prediction.png
"""

import json
import subprocess
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.request import urlopen

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import onelaunch as ol

quick = "--quick" in sys.argv


# 1. A CSV file with numbers, text and missing values. Use your own file instead.
def made_up_flats(rows: int, seed: int) -> pd.DataFrame:
    random = np.random.default_rng(seed)
    area = random.gamma(6, 13, rows) + 18
    year = random.integers(1890, 2025, rows).astype(float)
    district = random.choice(["Harbour", "Old Town", "Hillside", "Station"], rows)
    per_metre = (
        pd.Series(district).map({"Harbour": 5200, "Old Town": 6100, "Hillside": 4500, "Station": 3300}).to_numpy()
    )
    price = area * per_metre * (0.8 + 0.4 * ((year - 1957) / 67) ** 2) * random.lognormal(0, 0.08, rows)
    year[random.random(rows) < 0.1] = np.nan  # nobody remembers
    return pd.DataFrame({"area": area.round(1), "year": year, "district": district, "price": price.round(-3)})


made_up_flats(600 if quick else 4000, seed=0).to_csv("flats.csv", index=False)

# 2. Train. The command finds out the task, encodes the columns and keeps everything in a run folder.
run = Path(tempfile.mkdtemp(prefix="flats-", dir=".")) / "run"
subprocess.run(
    [sys.executable, "-m", "onelaunch", "train", "--data", "flats.csv", "--target", "price", "--out", run], check=True
)

# 3. Load the run. A Predictor takes a DataFrame, a dict of columns or the path of a file.
predictor = ol.load(run)
new = made_up_flats(300, seed=1)
print(predictor.evaluate(new))


# 4. Serve it. A request is a JSON object of columns; the answer is a list of prices.
class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        columns = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = json.dumps(predictor.predict(columns).tolist()).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(answer)


server = HTTPServer(("127.0.0.1", 0), Handler)  # port 0: any that is free
threading.Thread(target=server.serve_forever, daemon=True).start()

# 5. Ask it, as a client would.
question = {"area": [55.0, 90.0], "year": [1962.0, None], "district": ["Harbour", "Station"]}
with urlopen(f"http://127.0.0.1:{server.server_port}", data=json.dumps(question).encode()) as response:
    print(question, "->", json.load(response))
server.shutdown()
server.server_close()

# 6. The picture: predicted against true prices of flats that training has not seen.
figure, axes = plt.subplots(figsize=(6, 5), layout="constrained")
predicted = predictor.predict(new) / 1e3
for district, rows in new.groupby("district").groups.items():
    axes.scatter(new.price[rows] / 1e3, predicted[rows], s=14, alpha=0.7, label=district)
limit = new.price.max() / 1e3
axes.plot([0, limit], [0, limit], color="gray", linewidth=1)
axes.set(
    xlabel="true price (thousands)", ylabel="predicted price (thousands)", title="Flats that training has not seen"
)
axes.grid(alpha=0.3)
axes.legend()
figure.savefig("csv_to_served_prediction.png", dpi=80)
print("wrote csv_to_served_prediction.png")
