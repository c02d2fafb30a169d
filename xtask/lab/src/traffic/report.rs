//! The results as a table, as JSON and as a bar chart.

use super::Kind;
use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::process::Command;
use support::variants::Variant;

/// The results of one run, and the machine they belong to.
pub(crate) struct Report {
    kernel: String,
    cores: usize,
    commit: String,
    way: &'static str,
    rounds: u16,
    rows: Vec<Row>,
}

/// The results of one program with one kind of frame.
pub(crate) struct Row {
    kind: Kind,
    variant: Variant,
    /// CPU nanoseconds per frame in each round.
    rounds: Vec<f64>,
}

impl Row {
    /// Makes a row of the measurements of all rounds, in order.
    pub(crate) fn new(kind: Kind, variant: Variant, rounds: Vec<f64>) -> Self {
        Self { kind, variant, rounds }
    }

    fn median(&self) -> f64 {
        quantile(&self.rounds, 0.5)
    }
}

/// Returns the value below which the fraction `part` of the values lies. The values may be in any order.
fn quantile(values: &[f64], part: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let at = (sorted.len().saturating_sub(1) as f64 * part).round() as usize;
    sorted.get(at).copied().unwrap_or(f64::NAN)
}

impl Report {
    /// Makes a report, with kernel, cores and commit of this machine.
    pub(crate) fn new(way: &'static str, rounds: u16, rows: Vec<Row>) -> Result<Self> {
        let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease")
            .context("cannot read the kernel release")?;
        let output =
            Command::new("git").args(["rev-parse", "--short", "HEAD"]).current_dir(shell::top()).output();
        let commit = output.ok().filter(|output| output.status.success()).map_or_else(
            || "unknown".to_owned(),
            |output| String::from_utf8_lossy(&output.stdout).trim().to_owned(),
        );
        let cores = std::thread::available_parallelism()?.get();
        Ok(Self { kernel: kernel.trim().to_owned(), cores, commit, way, rounds, rows })
    }

    /// Returns the cost as a multiple of the cost without a program. It is the median of the ratios within each round,
    /// so that a slow round does not affect it.
    fn ratio(&self, row: &Row) -> f64 {
        let Some(bare) = self.rows.iter().find(|r| r.kind == row.kind && r.variant == Variant::None) else {
            return f64::NAN;
        };
        let ratios: Vec<f64> =
            row.rounds.iter().zip(&bare.rounds).map(|(with, without)| with / without).collect();
        quantile(&ratios, 0.5)
    }

    /// Returns the results as a table.
    pub(crate) fn text(&self) -> String {
        let Self { kernel, cores, commit, way, rounds, .. } = self;
        let mut text = format!(
            "CPU time of the whole system per ordinary frame that a guest sends, {way}\n\
             Linux {kernel}, {cores} cores, commit {commit}, {rounds} rounds: median, quartiles\n\n\
             {:<10} {:<12} {:>9} {:>19} {:>10}\n",
            "frame", "program", "ns", "quartiles", "ratio"
        );
        for row in &self.rows {
            let [low, high] = [0.25, 0.75].map(|part| quantile(&row.rounds, part));
            let _ = writeln!(
                text,
                "{:<10} {:<12} {:>9.0} {:>19} {:>10.3}",
                row.kind.name(),
                row.variant.name(),
                row.median(),
                format!("{low:.0} – {high:.0}"),
                self.ratio(row)
            );
        }
        text
    }

    /// Returns the results as JSON, with every round.
    pub(crate) fn json(&self) -> Value {
        let rows: Vec<Value> = self
            .rows
            .iter()
            .map(|row| {
                json!({
                    "frame": row.kind.name(),
                    "program": row.variant.name(),
                    "median_ns": row.median(),
                    "quartiles_ns": [quantile(&row.rounds, 0.25), quantile(&row.rounds, 0.75)],
                    "ratio": self.ratio(row),
                    "rounds_ns": row.rounds,
                })
            })
            .collect();
        json!({
            "kernel": self.kernel, "cores": self.cores, "commit": self.commit, "way": self.way, "rounds": self.rounds,
            "rows": rows,
        })
    }

    /// Returns a bar chart with a bar for each row, as long as its ratio.
    pub(crate) fn svg(&self) -> String {
        const BAR: usize = 18;
        const LEFT: usize = 190;
        const UNIT: f64 = 300.0;
        let height = self.rows.len() * BAR + 50;
        let mut svg = format!(
            "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 800 {height}' font-family='sans-serif' \
             font-size='12'>\n<text x='8' y='20'>CPU time per ordinary frame, relative to no program, {} (Linux {}, {} rounds)</text>\n",
            self.way, self.kernel, self.rounds
        );
        for (n, row) in self.rows.iter().enumerate() {
            let ratio = self.ratio(row);
            let (y, width) = (34 + n * BAR, (ratio * UNIT).clamp(0.0, 540.0));
            let colour = match row.variant {
                Variant::None | Variant::Empty => "#999",
                Variant::Native => "#c33",
                Variant::Generic => "#e90",
                Variant::Tcx => "#393",
                Variant::TcxInPod => "#36c",
            };
            let _ = writeln!(
                svg,
                "<text x='8' y='{}'>{}, {}</text><rect x='{LEFT}' y='{y}' width='{width:.1}' height='{}' \
                 fill='{colour}'/><text x='{:.1}' y='{}'>{ratio:.2} ({:.0} ns)</text>",
                y + 12,
                row.kind.name(),
                row.variant.name(),
                BAR - 3,
                LEFT as f64 + width + 6.0,
                y + 12,
                row.median()
            );
        }
        svg + "</svg>\n"
    }
}

#[cfg(test)]
mod tests {
    use super::{Kind, Report, Row, Variant, quantile};

    #[test]
    fn quantiles_are_measured_values() {
        let values = [5.0, 1.0, 4.0, 2.0, 3.0];
        assert_eq!([0.0, 0.25, 0.5, 1.0].map(|part| quantile(&values, part)), [1.0, 2.0, 3.0, 5.0]);
    }

    #[test]
    fn a_slow_round_does_not_change_the_ratio() {
        let row = |variant, rounds: [f64; 3]| Row::new(Kind::Tso, variant, rounds.to_vec());
        let rows =
            vec![row(Variant::None, [100.0, 1_000.0, 100.0]), row(Variant::Tcx, [110.0, 1_100.0, 110.0])];
        let report = Report::new("through a bridge", 3, rows).expect("this machine is known");
        assert!((report.ratio(&report.rows[1]) - 1.1).abs() < 1e-9);
        let json = report.json();
        assert_eq!(json["rows"][1]["program"], "tcx");
        assert!(report.text().contains("1.100") && report.svg().contains("1.10 (110 ns)"));
    }
}
