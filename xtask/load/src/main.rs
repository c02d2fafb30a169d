//! The verbs of `cargo xtask` that run the agent on hypervisors. They compile no part of the agent.

mod facts;
mod load;
mod plan;
#[cfg(test)]
mod scripts;

use anyhow::{Result, bail};
use clap::{Parser, Subcommand};
use shell::verbs;
use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitCode};

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
    Run(Args),
    #[command(about = verbs::UNLOAD)]
    Unload(load::UnloadArgs),
}

fn main() -> ExitCode {
    shell::exit_code(match Cli::parse().verb {
        Verb::Load(args) => load::run(&args),
        Verb::Run(args) => run(&args),
        Verb::Unload(args) => load::unload(&args),
    })
}

/// The agent's command line.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Cargo's build profile of the agent
    #[arg(long, value_name = "NAME", default_value = "dev")]
    profile: String,
    /// The agent's verb and options, for example `-- serve --records ./records --no-pins`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true, value_name = "WORDS")]
    words: Vec<OsString>,
}

/// Builds the agent and replaces this process by it, as root.
pub(crate) fn run(args: &Args) -> Result<()> {
    let words = ["build", "--package", "metadata-user", "--bin", "xdp-imds", "--profile"];
    shell::run(shell::cargo(words).arg(&args.profile))?;
    let directory = if args.profile == "dev" { "debug" } else { &args.profile };
    let agent = shell::target().join(directory).join("xdp-imds");
    let mut command = match shell::root() {
        shell::Root::Already => Command::new(&agent),
        shell::Root::Sudo(sudo) => {
            let mut command = Command::new(sudo);
            command.arg("--").arg(&agent);
            command
        }
        // Some verbs of the agent need no privilege. Those that do say so.
        shell::Root::No(_) => Command::new(&agent),
    };
    bail!("cannot run {}: {}", agent.display(), command.args(&args.words).exec())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::Cli;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
