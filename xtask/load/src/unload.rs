//! `cargo xtask unload`: opens the taps and takes away what `cargo xtask load` has put on a host.

use crate::facts::Facts;
use crate::facts::Hosts;
use crate::load::{self, Outcome, Row};
use crate::plan;
use anyhow::Result;
use std::time::Instant;

/// Which hosts to unload, and how thoroughly.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    hosts: Hosts,
    /// Also remove /etc/xdp-imds with configuration and records, and /var/lib/xdp-imds with token keys and what guests
    /// wrote
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
pub(crate) fn run(args: &Args) -> Result<()> {
    let mut rows = Vec::new();
    let mut failure = None;
    for host in args.hosts.list() {
        let started = Instant::now();
        let mut row = Row::new(&host, Outcome::Untouched);
        if failure.is_none() {
            let unloaded = host.root().and_then(|root| {
                let facts = Facts::of(&host, &root)?;
                eprintln!("{host}: {}", facts.line());
                facts.check_owner(&host)?;
                (row.machine, row.from) = (facts.machine.clone(), facts.version.clone());
                let steps = plan::unload(&facts, args.purge);
                if args.dry_run {
                    load::show(&host, &steps);
                    return Ok(Outcome::DryRun);
                }
                if steps.is_empty() {
                    eprintln!("{host}: `cargo xtask load` has put nothing there");
                    return Ok(Outcome::Untouched);
                }
                load::walk(&host, &root, &steps)?;
                Ok(Outcome::Unloaded)
            });
            row.outcome = unloaded.unwrap_or_else(|error| {
                failure = Some(error);
                Outcome::Failed
            });
        }
        row.seconds = started.elapsed().as_secs_f64();
        rows.push(row);
    }
    load::print(&rows, args.json)?;
    failure.map_or(Ok(()), Err)
}
