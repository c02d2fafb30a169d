//! `cargo xtask <verb>`: build, test, demo and lab. One file per verb; this one is the list.

mod book;
mod build_ebpf;
mod ci;
mod deb;
mod demo;
mod fuzz;
mod guest;
mod haul;
mod image;
mod lab;
mod manifests;
mod miri;
mod schemas;
mod shell;
mod soak;
mod storm;
mod test;
mod tools;
mod traffic;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Build, test and try xdp-imds")]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Write the generated pages of the book, hold README and book to the code, and build it
    Book(book::Args),
    /// Rebuild the eBPF object from source, or prove that the committed one is its source's
    BuildEbpf(build_ebpf::Args),
    /// Everything a change must pass: format, lints, docs, licences, the eBPF object, tests
    Ci(ci::Args),
    /// Make the Debian package, look through it, and install, use and purge it on a throw-away copy of this system
    Deb(deb::Args),
    /// Show it: guests on true taps ask the real agent and get their own metadata
    Demo(demo::Args),
    /// Fuzz: every target for a while, from the committed seeds on
    Fuzz(fuzz::Args),
    /// Boot a real Debian guest on a served tap and report what its cloud-init made of it
    Guest(guest::Args),
    /// Large answers by the million to guests of two kinds, with and without loss, and none may stand still
    Haul(haul::Args),
    /// Write the agent as an OCI image, the same octets each time
    Image(image::Args),
    /// A lab that stays: a node and guests to work with by hand
    Lab(lab::Args),
    /// Render and judge what is deployed, without a cluster
    Manifests(manifests::Args),
    /// Run the unsafe code that needs no kernel under Miri
    Miri(miri::Args),
    /// Make the extract of published schemas that tests hold objects to, or prove that it is what was published
    Schemas(schemas::Args),
    /// Hours of churn, restarts and hostile guests in minutes, with an eye on everything that could leak
    Soak(soak::Args),
    /// Boot thousands of guests at once, on us and on peers, and measure
    Storm(Box<storm::Args>),
    /// Build as you, test as root, count what was skipped
    Test(test::Args),
    /// The load generator of a storm (started by `storm`)
    #[command(hide = true)]
    StormGuests(storm::guest::Args),
    /// Measure what steering costs guests' ordinary traffic, by program and kind of frame
    Traffic(traffic::Args),
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().verb {
        Verb::Book(args) => book::run(&args),
        Verb::BuildEbpf(args) => build_ebpf::run(&args),
        Verb::Ci(args) => ci::run(&args),
        Verb::Deb(args) => deb::run(&args),
        Verb::Demo(args) => demo::run(&args),
        Verb::Fuzz(args) => fuzz::run(&args),
        Verb::Guest(args) => guest::run(&args),
        Verb::Haul(args) => haul::run(&args),
        Verb::Image(args) => image::run(&args),
        Verb::Lab(args) => lab::run(args),
        Verb::Manifests(args) => manifests::run(&args),
        Verb::Miri(args) => miri::run(&args),
        Verb::Schemas(args) => schemas::run(&args),
        Verb::Soak(args) => soak::run(args),
        Verb::Storm(args) => storm::run(*args),
        Verb::Test(args) => test::run(&args),
        Verb::StormGuests(args) => storm::guest::run(&args),
        Verb::Traffic(args) => traffic::run(&args),
    }
}
