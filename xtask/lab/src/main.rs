//! The verbs of `cargo xtask` that use the agent's own crates or the code of its tests: load, soak, real guests,
//! containers.

mod guest;
mod haul;
mod soak;
mod storm;
mod traffic;
mod trial;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Boot a real Debian guest on a served tap and report what its cloud-init did
    Guest(guest::Args),
    /// Send millions of large answers to two kinds of guests, with and without loss, and fail on any stall
    Haul(haul::Args),
    /// Serve a guest from a container of an image (started by `image --try`)
    #[command(hide = true)]
    ImageTrial(trial::Args),
    /// Put hours of churn, restarts and hostile guests into minutes, and watch everything that could leak
    Soak(soak::Args),
    /// Boot thousands of guests at once on the agent and on peers, and measure
    Storm(Box<storm::Args>),
    /// Generate the load of a storm (started by `storm`)
    #[command(hide = true)]
    StormGuests(storm::guest::Args),
    /// Measure what steering costs guests' other traffic, by program and kind of frame
    Traffic(traffic::Args),
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().verb {
        Verb::Guest(args) => guest::run(&args),
        Verb::Haul(args) => haul::run(&args),
        Verb::ImageTrial(args) => trial::run(&args),
        Verb::Soak(args) => soak::run(args),
        Verb::Storm(args) => storm::run(*args),
        Verb::StormGuests(args) => storm::guest::run(&args),
        Verb::Traffic(args) => traffic::run(&args),
    }
}
