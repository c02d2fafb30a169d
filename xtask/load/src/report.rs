//! Progress on standard error while hosts are worked on, and a table of the results.

use crate::host::{Host, Prefix};
use crate::plan::Step;
use anyhow::{Context as _, Result};
use serde::Serialize;
use std::time::Instant;

/// What became of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Outcome {
    /// The agent was started for the first time.
    Loaded,
    /// The agent took over from a previous one.
    Upgraded,
    /// The agent before came back, and took over if one ran.
    RolledBack,
    /// The agent was taken away.
    Unloaded,
    /// A step failed.
    Failed,
    /// Nothing was done: an earlier host failed, or there was nothing to do.
    Untouched,
    /// Nothing was done, because the steps were only to be shown.
    DryRun,
}

impl Outcome {
    fn name(self) -> &'static str {
        match self {
            Self::Loaded => "loaded",
            Self::Upgraded => "upgraded",
            Self::RolledBack => "rolled back",
            Self::Unloaded => "unloaded",
            Self::Failed => "FAILED",
            Self::Untouched => "untouched",
            Self::DryRun => "dry run",
        }
    }
}

/// A row of the table.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) host: String,
    pub(crate) machine: String,
    pub(crate) outcome: Outcome,
    /// What the binary before said of itself.
    pub(crate) from: Option<String>,
    /// What the present binary says of itself.
    pub(crate) to: Option<String>,
    pub(crate) seconds: f64,
}

impl Row {
    /// Returns the row of a host that has told nothing of itself.
    pub(crate) fn new(host: &Host, outcome: Outcome) -> Self {
        Self { host: host.to_string(), machine: "-".into(), outcome, from: None, to: None, seconds: 0.0 }
    }
}

/// Prints the results on standard output.
pub(crate) fn print(rows: &[Row], json: bool) -> Result<()> {
    if json {
        println!("{}", serde_json::to_string_pretty(rows)?);
    } else {
        print!("{}", table(rows));
    }
    Ok(())
}

fn table(rows: &[Row]) -> String {
    let width = rows.iter().map(|row| row.host.len()).max().unwrap_or(0).max(4);
    let line = |row: &Row| {
        let version = match (&row.from, &row.to) {
            (Some(from), Some(to)) => format!("{from} → {to}"),
            (Some(from), None) => from.clone(),
            (None, Some(to)) => to.clone(),
            (None, None) => "-".into(),
        };
        let (outcome, seconds) = (row.outcome.name(), row.seconds);
        format!("{:width$}  {:8}  {outcome:11}  {seconds:>7.1}  {version}\n", row.host, row.machine)
    };
    let head =
        format!("{:width$}  {:8}  {:11}  {:>7}  {}\n", "HOST", "MACHINE", "OUTCOME", "SECONDS", "AGENT");
    head + &rows.iter().map(line).collect::<String>()
}

/// Runs steps on a host and shows each. Returns the standard output of the first one.
pub(crate) fn walk(host: &Host, root: &Prefix, steps: &[Step]) -> Result<String> {
    let mut first = None;
    for step in steps {
        eprintln!("{host}: {}", step.says);
        let started = Instant::now();
        let printed = host.run(root, &step.script).with_context(|| step.says.clone())?;
        if started.elapsed().as_secs() > 0 {
            eprintln!("{host}:   done after {:.1} s", started.elapsed().as_secs_f64());
        }
        first.get_or_insert(printed);
    }
    Ok(first.unwrap_or_default())
}

/// Shows steps that are not done.
pub(crate) fn show<'a>(host: &Host, steps: impl IntoIterator<Item = &'a Step>) {
    for (number, step) in steps.into_iter().enumerate() {
        eprintln!("{host}: would {:>2}. {}", number + 1, step.says);
    }
}

#[cfg(test)]
mod tests {
    use super::{Outcome, Row, table};
    use crate::host::Host;

    #[test]
    fn the_table_has_a_row_for_each_host_with_both_versions() {
        let row = |host: &str, outcome, from: Option<&str>, to: Option<&str>| Row {
            host: host.into(),
            machine: "x86_64".into(),
            outcome,
            from: from.map(Into::into),
            to: to.map(Into::into),
            seconds: 4.25,
        };
        let rows = [
            row("hv1", Outcome::Upgraded, Some("0.1"), Some("0.2")),
            row("hv-two", Outcome::RolledBack, Some("0.2"), Some("0.1")),
            Row::new(&Host::Here, Outcome::Failed),
        ];
        let expected = "HOST       MACHINE   OUTCOME      SECONDS  AGENT\n\
                        hv1        x86_64    upgraded         4.2  0.1 → 0.2\n\
                        hv-two     x86_64    rolled back      4.2  0.2 → 0.1\n\
                        this host  -         FAILED           0.0  -\n";
        assert_eq!(table(&rows), expected);
    }
}
