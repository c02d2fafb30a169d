//! The verbs of `cargo xtask` that make or check committed or released files.

mod book;
mod build_ebpf;
mod deb;
mod image;
mod manifests;
mod schemas;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Write the generated pages of the book, check README and book against the code, and build it
    Book(book::Args),
    /// Rebuild the eBPF object from source, or check that the committed one matches its source
    BuildEbpf(build_ebpf::Args),
    /// Make the Debian package, check its contents, and install, use and purge it on a throw-away copy of this system
    Deb(deb::Args),
    /// Write the agent as an OCI image, reproducible octet for octet
    Image(image::Args),
    /// Render and check the deployment manifests, without a cluster
    Manifests(manifests::Args),
    /// Make the extract of published schemas that tests check objects against, or check that it is up to date
    Schemas(schemas::Args),
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().verb {
        Verb::Book(args) => book::run(&args),
        Verb::BuildEbpf(args) => build_ebpf::run(&args),
        Verb::Deb(args) => deb::run(&args),
        Verb::Image(args) => image::run(&args),
        Verb::Manifests(args) => manifests::run(&args),
        Verb::Schemas(args) => schemas::run(&args),
    }
}
