//! The verbs of `cargo xtask` that use the agent's own crates or the code of its tests: load, soak, real guests,
//! containers.

mod control_group;
mod guest;
mod haul;
mod soak;
mod storm;
mod traffic;
mod trial;

use clap::{Parser, Subcommand};
use shell::verbs;
use std::process::ExitCode;

#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    #[command(about = verbs::GUEST)]
    Guest(guest::Args),
    #[command(about = verbs::HAUL)]
    Haul(haul::Args),
    /// Serve a guest from a container of an image (started by `image --try`)
    #[command(hide = true)]
    ImageTrial(trial::Args),
    #[command(about = verbs::SOAK)]
    Soak(soak::Args),
    #[command(about = verbs::STORM)]
    Storm(Box<storm::Args>),
    /// Generate the load of a storm (started by `storm`)
    #[command(hide = true)]
    StormGuests(storm::guest::Args),
    #[command(about = verbs::TRAFFIC)]
    Traffic(traffic::Args),
}

fn main() -> ExitCode {
    shell::exit_code(match Cli::parse().verb {
        Verb::Guest(args) => guest::run(&args),
        Verb::Haul(args) => haul::run(&args),
        Verb::ImageTrial(args) => trial::run(&args),
        Verb::Soak(args) => soak::run(args),
        Verb::Storm(args) => storm::run(*args),
        Verb::StormGuests(args) => storm::guest::run(&args),
        Verb::Traffic(args) => traffic::run(&args),
    })
}
