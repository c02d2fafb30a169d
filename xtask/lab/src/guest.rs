//! `cargo xtask guest`: boots a real Debian 12 guest on a tap that xdp-imds serves, and reports the results of its
//! unmodified cloud-init.
//!
//! ```text
//!  private network namespace
//!  ┌───────────────────────────────────────────────────────────────┐
//!  │ QEMU: Debian 12 ── tap0 ── XDP `port` ── xdp-imds serve       │
//!  │  ttyS0 console.log  │                                         │
//!  │  ttyS1 report.json  └── br0 10.0.2.2/16 ── dnsmasq (DHCP)     │
//!  └───────────────────────────────────────────────────────────────┘
//! ```

mod boot;
mod findings;
mod image;
mod libvirt;
mod print;
mod report;
mod subject;
mod wire;

use anyhow::{Result, ensure};
use shell::tools;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;
use subject::Dialect;
use subject::Subject;

/// The programs that the verb runs, and their Debian packages.
const TOOLS: &[(&str, &str)] = &[
    ("debootstrap", "debootstrap"),
    ("dnsmasq", "dnsmasq-base"),
    ("ip", "iproute2"),
    ("mke2fs", "e2fsprogs"),
    ("qemu-system-x86_64", "qemu-system-x86"),
];

/// Dialects, timeout, image and agent of a run.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The dialects to boot, separated by commas, one boot each. The guest's SMBIOS shows the dialect, and cloud-init
    /// must find it
    #[arg(long, value_enum, value_delimiter = ',', default_value = "nocloud")]
    dialect: Vec<Dialect>,
    /// The longest time from power-on to the guest's report, in seconds
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u64).range(10..=3_600))]
    timeout: u64,
    /// Let Debian's libvirt start the guest; its hook makes the record from the domain's metadata and a file
    #[arg(long)]
    libvirt: bool,
    /// Make the image again, even if the cached one fits its recipe
    #[arg(long)]
    rebuild: bool,
    /// Make the image and boot nothing
    #[arg(long)]
    image_only: bool,
    /// The agent to run, instead of building one
    #[arg(long, value_name = "FILE")]
    agent: Option<PathBuf>,
}

/// Runs the verb.
pub(crate) fn run(args: &Args) -> Result<()> {
    if args.image_only {
        let image = ready(args)?;
        println!("image ready: {}", image.disk().display());
        return Ok(());
    }
    let agent = match &args.agent {
        Some(agent) => agent.clone(),
        None => {
            let words = ["build", "--release", "--package", "metadata-user", "--bin", "xdp-imds"];
            shell::run(&mut shell::cargo(words))?;
            let built = shell::target().join("release/xdp-imds");
            shell::go_on_as_root(&[OsString::from("--agent"), built.clone().into()])?;
            built
        }
    };
    let image = ready(args)?;
    let mut boots = Vec::new();
    for &dialect in &args.dialect {
        let subject = Subject::of(dialect);
        let directory = shell::target().join("guest").join(dialect.name());
        let patience = Duration::from_secs(args.timeout);
        let (outcome, more) = if args.libvirt {
            libvirt::boot(&image, &subject, &agent, &directory.with_extension("libvirt"), patience)?
        } else {
            (boot::boot(&image, &subject, &agent, &directory, patience)?, Vec::new())
        };
        let mut findings = findings::findings(&subject, &outcome);
        findings.extend(more);
        print::boot(&subject, &outcome, &findings)?;
        boots.push((subject, outcome, findings));
    }
    if boots.len() > 1 {
        print::table(&boots);
    }
    let findings: Vec<_> = boots.iter().flat_map(|(_, _, findings)| findings).collect();
    let failed = findings.iter().filter(|finding| !finding.holds).count();
    ensure!(failed == 0, "{failed} of {} checks failed; see above", findings.len());
    Ok(())
}

/// Becomes root, installs missing tools and returns the image.
fn ready(args: &Args) -> Result<image::Image> {
    shell::go_on_as_root(&[])?;
    tools::ensure(TOOLS)?;
    if args.libvirt {
        tools::ensure(support::libvirt::TOOLS)?;
    }
    image::ready(&shell::target().join("guest-image"), args.rebuild)
}
