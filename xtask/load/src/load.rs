//! `cargo xtask load`: the agent on this host or on others, from the build to an agent that serves. On a host that has
//! one it is an upgrade: the new agent takes over from the old one.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use serde::Serialize;

use crate::facts::{self, Facts, Host, Hosts, Prefix};
use crate::plan::{self, BINARY, CONFIG, HostStep, LIB, LOG, SERVICE, Source, Wanted};

/// What `--help` says at its end.
pub(crate) const MORE: &str = "\
Hosts are loaded one after the other, up to the first one that is not well. On each host, `doctor`
of the new agent runs first, and if it fails, nothing is changed.

Examples:
  Load this host:
      cargo xtask load
  Load or upgrade two hypervisors over ssh:
      cargo xtask load --host hv1 hv2
  Go back to the binary before:
      cargo xtask load --host hv1 --rollback";

/// Longest time that an agent may take to become ready, by default, in seconds.
const READY_WITHIN: u32 = 120;

/// Which hosts to load, with what.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    hosts: Hosts,
    /// The agent to load, instead of building a static one for each host's machine
    #[arg(long, value_name = "FILE")]
    agent: Option<PathBuf>,
    /// Cargo's build profile
    #[arg(long, value_name = "NAME", default_value = "release", conflicts_with = "agent")]
    profile: String,
    /// The configuration to put in place. Without it, hosts keep theirs; a host that has none serves
    /// /etc/xdp-imds/records.d
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Go back to the binary before the present one, which the last load kept; configurations stay
    #[arg(long, conflicts_with_all = ["agent", "profile", "config"])]
    rollback: bool,
    /// Longest time that an agent may take to become ready, in seconds (`120` or `120s`)
    #[arg(long, value_name = "SECONDS", default_value_t = READY_WITHIN, value_parser = seconds)]
    timeout: u32,
    /// Ask the hosts and print what would be done, but do nothing
    #[arg(long)]
    dry_run: bool,
    /// Print the results as JSON on standard output (progress always goes to standard error)
    #[arg(long)]
    json: bool,
}

/// Parses `--timeout`.
fn seconds(text: &str) -> Result<u32, String> {
    let number = text.strip_suffix('s').unwrap_or(text).parse();
    let within = number.ok().filter(|seconds| (1..=3_600).contains(seconds));
    within.ok_or_else(|| "expected whole seconds such as `120` or `120s`, from 1 to 3600".to_owned())
}

/// A host that has answered.
struct Known {
    root: Prefix,
    facts: Facts,
}

/// Runs the verb.
pub(crate) fn run(args: &Args) -> Result<()> {
    let config = args.config.as_ref().map(|path| {
        fs::read_to_string(path).with_context(|| format!("cannot read the configuration {}", path.display()))
    });
    let config = config.transpose()?;
    let mut failure = None;
    // Every host is asked, so that one run shows all that cannot be loaded. Then none is.
    let hosts: Vec<_> = args.hosts.list().into_iter().map(|host| (ask(&host, args), host)).collect();
    for (asked, host) in &hosts {
        if let Err(error) = asked {
            eprintln!("{host}: {error:#}");
            failure =
                failure.or_else(|| Some(anyhow!("{host} cannot be loaded; nothing was changed on any host")));
        }
    }
    let mut agents = BTreeMap::new();
    if failure.is_none() && !args.dry_run && !args.rollback {
        let machines = hosts.iter().filter_map(|(asked, _)| Some(&asked.as_ref().ok()?.facts.machine));
        match build_agents(machines, args) {
            Ok(built) => agents = built,
            Err(error) => failure = Some(error),
        }
    }
    let mut rows = Vec::new();
    for (asked, host) in &hosts {
        let started = Instant::now();
        let Ok(known) = asked else {
            rows.push(HostRow::new(host, LoadOutcome::Failed));
            continue;
        };
        let facts = &known.facts;
        let source =
            if args.rollback { Source::Previous } else { Source::File(agents.get(&facts.machine).cloned()) };
        let wanted = Wanted { source, config: config.clone(), ready_within: args.timeout };
        let (outcome, to) = match &failure {
            Some(_) => (LoadOutcome::Untouched, None),
            None => match load(host, known, &wanted, args) {
                Ok(loaded) => loaded,
                Err(error) => {
                    failure = Some(error);
                    (LoadOutcome::Failed, None)
                }
            },
        };
        let (from, seconds) = (facts.version.clone(), started.elapsed().as_secs_f64());
        let machine = facts.machine.clone();
        rows.push(HostRow { from, to, seconds, machine, ..HostRow::new(host, outcome) });
    }
    print(&rows, args.json)?;
    failure.map_or(Ok(()), Err)
}

/// Asks a host what it has. Fails if the host cannot be loaded by this verb.
fn ask(host: &Host, args: &Args) -> Result<Known> {
    let root = host.root()?;
    let facts = Facts::of(host, &root)?;
    eprintln!("{host}: {}", facts.line());
    facts.check_owner(host)?;
    ensure!(
        !args.rollback || facts.previous.is_some(),
        "{host} has no {LIB}/previous: there is no binary to go back to. Load the one you want with --agent FILE"
    );
    Ok(Known { root, facts })
}

/// Builds or finds the agent for each of these machines; returns its path and its size in bytes.
fn build_agents<'a>(
    machines: impl Iterator<Item = &'a String>,
    args: &Args,
) -> Result<BTreeMap<String, (PathBuf, u64)>> {
    let mut agents = BTreeMap::new();
    for machine in machines {
        if agents.contains_key(machine) {
            continue;
        }
        let path = match &args.agent {
            Some(path) => path.clone(),
            None => facts::build(machine, &args.profile)?,
        };
        facts::check(&path, machine)?;
        let size = fs::metadata(&path)?.len();
        agents.insert(machine.clone(), (path, size));
    }
    Ok(agents)
}

/// Loads one host. Returns what became of it and what the new agent says of itself.
fn load(host: &Host, known: &Known, wanted: &Wanted, args: &Args) -> Result<(LoadOutcome, Option<String>)> {
    let Known { root, facts } = known;
    let plan = plan::load(facts, wanted);
    if args.dry_run {
        show(host, plan.before.iter().chain(&plan.after));
        return Ok((LoadOutcome::DryRun, None));
    }
    let version = match walk(host, root, &plan.before) {
        Ok(printed) => printed.trim().to_owned(),
        Err(error) => return Err(after_undo(host, error, walk(host, root, &[plan::undo(facts, wanted)]))),
    };
    if let Err(error) = walk(host, root, &plan.after) {
        // A load of the binary that was there already keeps none. A host that does not answer may have one.
        let has_previous = !Facts::of(host, root).is_ok_and(|now| now.previous.is_none());
        bail!("{error:#}\n{}", next_step(host, facts, args, has_previous));
    }
    let outcome = match (args.rollback, facts.runs()) {
        (true, _) => LoadOutcome::RolledBack,
        (false, true) => LoadOutcome::Upgraded,
        (false, false) => LoadOutcome::Loaded,
    };
    Ok((outcome, Some(version)))
}

/// The error of a load whose steps were undone; if that failed too, with what the host may still have.
fn after_undo(host: &Host, error: anyhow::Error, undone: Result<String>) -> anyhow::Error {
    match undone {
        Ok(_) => error,
        Err(undoing) => anyhow!(
            "{error:#}\n{host} may not be as it was before: {undoing:#}; correct both, then run the command again"
        ),
    }
}

/// Says what to do after a failure behind the takeover.
fn next_step(host: &Host, facts: &Facts, args: &Args, has_previous: bool) -> String {
    let log = if facts.systemd { format!("journalctl -u {SERVICE}") } else { format!("tail {LOG}") };
    let words = args.hosts.shown(host);
    let back = if facts.version.is_some() && has_previous && !args.rollback {
        format!("`cargo xtask load{words} --rollback` goes back to the binary before")
    } else {
        format!("`cargo xtask unload{words}` takes everything away again")
    };
    format!(
        "{host} has the new agent as {BINARY}, and needs you: look at `{log}` and `xdp-imds status --config {CONFIG}` \
         there. Then run the command again, or: {back}"
    )
}

// Progress on standard error while hosts are worked on, and a table of the results.

/// What became of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum LoadOutcome {
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

impl LoadOutcome {
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
pub(crate) struct HostRow {
    pub(crate) host: String,
    pub(crate) machine: String,
    pub(crate) outcome: LoadOutcome,
    /// What the binary before said of itself.
    pub(crate) from: Option<String>,
    /// What the present binary says of itself.
    pub(crate) to: Option<String>,
    pub(crate) seconds: f64,
}

impl HostRow {
    /// Returns the row of a host that has told nothing of itself.
    pub(crate) fn new(host: &Host, outcome: LoadOutcome) -> Self {
        Self { host: host.to_string(), machine: "-".into(), outcome, from: None, to: None, seconds: 0.0 }
    }
}

/// Prints the results on standard output.
pub(crate) fn print(rows: &[HostRow], json: bool) -> Result<()> {
    if json {
        println!("{}", serde_json::to_string_pretty(rows)?);
    } else {
        print!("{}", table(rows));
    }
    Ok(())
}

fn table(rows: &[HostRow]) -> String {
    let width = rows.iter().map(|row| row.host.len()).max().unwrap_or(0).max(4);
    let line = |row: &HostRow| {
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
pub(crate) fn walk(host: &Host, root: &Prefix, steps: &[HostStep]) -> Result<String> {
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
pub(crate) fn show<'a>(host: &Host, steps: impl IntoIterator<Item = &'a HostStep>) {
    for (number, step) in steps.into_iter().enumerate() {
        eprintln!("{host}: would {:>2}. {}", number + 1, step.says);
    }
}

// `cargo xtask unload`: opens the taps and takes away what `cargo xtask load` has put on a host.

/// Which hosts to unload, and how thoroughly.
#[derive(clap::Args)]
pub(crate) struct UnloadArgs {
    #[command(flatten)]
    hosts: Hosts,
    /// Also remove /etc/xdp-imds with configuration and records, /var/lib/xdp-imds with token keys and what guests
    /// wrote, and /var/log/xdp-imds
    #[arg(long)]
    purge: bool,
    /// Ask the hosts and print what would be done, but do nothing
    #[arg(long)]
    dry_run: bool,
    /// Print the results as JSON on standard output (progress always goes to standard error)
    #[arg(long)]
    json: bool,
}

/// Runs the verb.
pub(crate) fn unload(args: &UnloadArgs) -> Result<()> {
    let mut rows = Vec::new();
    let mut failure = None;
    for host in args.hosts.list() {
        let started = Instant::now();
        let mut row = HostRow::new(&host, LoadOutcome::Untouched);
        if failure.is_none() {
            let unloaded = host.root().and_then(|root| {
                let facts = Facts::of(&host, &root)?;
                eprintln!("{host}: {}", facts.line());
                facts.check_owner(&host)?;
                (row.machine, row.from) = (facts.machine.clone(), facts.version.clone());
                let steps = plan::unload(&facts, args.purge);
                if args.dry_run {
                    show(&host, &steps);
                    return Ok(LoadOutcome::DryRun);
                }
                if steps.is_empty() {
                    eprintln!("{host}: `cargo xtask load` has put nothing there");
                    return Ok(LoadOutcome::Untouched);
                }
                walk(&host, &root, &steps)?;
                Ok(LoadOutcome::Unloaded)
            });
            row.outcome = unloaded.unwrap_or_else(|error| {
                failure = Some(error);
                LoadOutcome::Failed
            });
        }
        row.seconds = started.elapsed().as_secs_f64();
        rows.push(row);
    }
    print(&rows, args.json)?;
    failure.map_or(Ok(()), Err)
}

#[cfg(test)]
mod tests {
    use super::{HostRow, LoadOutcome, after_undo, table};
    use crate::facts::Host;
    use anyhow::anyhow;

    #[test]
    fn the_error_of_a_load_is_shown_also_if_undoing_it_fails() {
        let failed = || anyhow!("no room").context("copy the agent");
        for (undone, expected) in [
            (Ok(String::new()), &["copy the agent: no room"][..]),
            (
                Err(anyhow!("connection lost").context("remove what was copied")),
                &[
                    "copy the agent: no room\n",
                    "this host",
                    "remove what was copied: connection lost",
                    "again",
                ],
            ),
        ] {
            let shown = format!("{:#}", after_undo(&Host::Here, failed(), undone));
            assert!(expected.iter().all(|text| shown.contains(text)), "{expected:?}: {shown}");
        }
    }

    #[test]
    fn the_table_has_a_row_for_each_host_with_both_versions() {
        let row = |host: &str, outcome, from: Option<&str>, to: Option<&str>| HostRow {
            host: host.into(),
            machine: "x86_64".into(),
            outcome,
            from: from.map(Into::into),
            to: to.map(Into::into),
            seconds: 4.25,
        };
        let rows = [
            row("hv1", LoadOutcome::Upgraded, Some("0.1"), Some("0.2")),
            row("hv-two", LoadOutcome::RolledBack, Some("0.2"), Some("0.1")),
            HostRow::new(&Host::Here, LoadOutcome::Failed),
        ];
        let expected = "HOST       MACHINE   OUTCOME      SECONDS  AGENT\n\
                    hv1        x86_64    upgraded         4.2  0.1 → 0.2\n\
                    hv-two     x86_64    rolled back      4.2  0.2 → 0.1\n\
                    this host  -         FAILED           0.0  -\n";
        assert_eq!(table(&rows), expected);
    }
}
