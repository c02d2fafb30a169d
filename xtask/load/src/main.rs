//! The verbs of `cargo xtask` that run the agent on hypervisors. They compile no part of the agent.

mod facts;
mod load;
mod plan;
mod run;
mod unload;

use clap::{Parser, Subcommand};
use shell::verbs;

#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    #[command(about = verbs::LOAD, after_help = load::MORE)]
    Load(load::Args),
    #[command(about = verbs::RUN)]
    Run(run::Args),
    #[command(about = verbs::UNLOAD)]
    Unload(unload::Args),
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().verb {
        Verb::Load(args) => load::run(&args),
        Verb::Run(args) => run::run(&args),
        Verb::Unload(args) => unload::run(&args),
    }
}

#[cfg(test)]
mod tests {
    use super::Cli;
    use clap::CommandFactory as _;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
