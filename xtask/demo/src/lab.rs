//! `cargo xtask lab`: a node and guests that stay up, to work with by hand.
//!
//! A background process holds the guests' taps and carries their frames. The rest of the lab is namespaces whose names
//! begin with `xdp-imds-lab-`.

use anyhow::{Context as _, Result, bail, ensure};
use shell::tools;
use std::fs::File;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use testbed::agent::{self, PortArgument};
use testbed::eventually;
use testbed::guest::{Guest, METADATA, Spec};
use testbed::host::Host;
use testbed::netns::{Namespace, RUN_NETNS};
use testbed::process;
use testbed::record::Identity;
use testbed::tap::Shape;

const STATE: &str = "/run/xdp-imds-lab";
const PREFIX: &str = "xdp-imds-lab-";
/// The most guests of a lab: each takes a namespace and a thread.
const MAX_GUESTS: u16 = 256;
/// The longest time a lab may take to come up or to go down.
const PATIENCE: Duration = Duration::from_secs(60);

/// The lab's own verb.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(clap::Subcommand)]
enum Verb {
    /// Make the node, the guests and their records, and print what to do next
    Up(Size),
    /// Remove everything the lab made
    Down,
    /// Open a shell in `host` (the default) or `guest-N`, or run a command there
    Shell {
        /// Where to run it: `host` or `guest-N`
        #[arg(default_value = "host")]
        place: String,
        /// The command to run instead of a shell
        #[arg(trailing_var_arg = true)]
        command: Vec<String>,
    },
    /// Hold the guests' taps (started by `up`)
    #[command(hide = true)]
    Hold(Size),
}

#[derive(clap::Args)]
struct Size {
    /// Number of guests
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=i64::from(MAX_GUESTS)))]
    guests: u16,
    /// Make taps without a virtio header: no offloads, every frame complete
    #[arg(long)]
    plain: bool,
}

/// Runs the verb.
pub(crate) fn run(args: Args) -> Result<()> {
    shell::go_on_as_root(&[])?;
    match args.verb {
        Verb::Up(size) => up(&size),
        Verb::Down => down(),
        Verb::Shell { place, command } => enter(&place, &command),
        Verb::Hold(size) => hold(&size),
    }
}

fn pid_file() -> PathBuf {
    Path::new(STATE).join("pid")
}

fn records() -> PathBuf {
    Path::new(STATE).join("records")
}

fn up(size: &Size) -> Result<()> {
    tools::ensure(tools::LAB)?;
    ensure!(
        !Path::new(STATE).exists(),
        "a lab is already up, or was not taken down; run `cargo xtask lab down`"
    );
    std::fs::create_dir_all(records()).with_context(|| format!("cannot make {STATE}"))?;
    let log = Path::new(STATE).join("log");
    let mut holder = Command::new(std::env::current_exe()?);
    holder.args(["lab", "hold", "--guests", &size.guests.to_string()]);
    if size.plain {
        holder.arg("--plain");
    }
    // The holder gets a process group of its own, so that Ctrl-C in this terminal does not end it.
    holder.process_group(0).stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(&log)?);
    let mut child = holder.spawn()?;
    let started = eventually(PATIENCE, || {
        let ended = child.try_wait()?.is_some();
        ensure!(ended || pid_file().exists(), "the lab is not up yet");
        Ok(!ended)
    });
    if !started? {
        let output = std::fs::read_to_string(&log).unwrap_or_default();
        down()?;
        bail!("the lab did not come up: {}", output.trim());
    }
    explain(size);
    Ok(())
}

fn explain(size: &Size) {
    let guests = || (0..size.guests).map(Identity::of);
    let ports: Vec<_> = guests().map(|guest| PortArgument::new(Host::tap_name(&guest), guest.mac)).collect();
    let words: Vec<_> =
        agent::arguments(&records(), &ports).iter().map(|word| word.to_string_lossy().into_owned()).collect();
    println!("The node is the namespace {PREFIX}host; these are its guests:");
    for guest in guests() {
        println!(
            "  {:<10} {:<12} {:<15} {}",
            guest.hostname,
            Host::tap_name(&guest),
            guest.address.to_string(),
            guest.mac
        );
    }
    println!("\nTheir records are in {}. Start the agent on the node:", records().display());
    println!(
        "  cargo build --release && cargo xtask lab shell host target/release/xdp-imds {}",
        words.join(" ")
    );
    println!("Ask it as a guest:");
    println!("  cargo xtask lab shell guest-0 curl -s http://{METADATA}/v1/meta-data");
    println!("Enter the node (`host`) or a guest (`guest-0` …), and take the lab down:");
    println!("  cargo xtask lab shell guest-0\n  cargo xtask lab down");
}

/// Makes the lab and holds it until this process ends; the taps disappear with the process.
fn hold(size: &Size) -> Result<()> {
    let shape = if size.plain { Shape::default() } else { Shape::virtio() };
    let host = Host::inside(Namespace::create(&format!("{PREFIX}host"))?)?;
    let mut guests = Vec::new();
    for identity in (0..size.guests).map(Identity::of) {
        identity.write(&records(), 1)?;
        let tap = host.tap(&identity, shape)?;
        let ns = Namespace::create(&format!("{PREFIX}{}", identity.hostname))?;
        guests.push(Guest::boot_on(tap, ns, &Spec { shape, ..Spec::of(&identity) })?);
    }
    testbed::record::replace(&pid_file(), &std::process::id().to_string())?;
    loop {
        std::thread::park();
    }
}

fn down() -> Result<()> {
    if let Ok(text) = std::fs::read_to_string(pid_file()) {
        let pid: u32 =
            text.trim().parse().with_context(|| format!("{} holds no process id", pid_file().display()))?;
        if is_holder(pid) {
            process::terminate(pid)?;
            eventually(PATIENCE, || {
                ensure!(!is_holder(pid), "process {pid} still holds the lab");
                Ok(())
            })?;
        }
    }
    for entry in std::fs::read_dir(RUN_NETNS).into_iter().flatten().flatten() {
        let name = entry.file_name();
        if let Some(name) = name.to_str().filter(|name| name.starts_with(PREFIX)) {
            Namespace::open(name)?.remove()?;
        }
    }
    if Path::new(STATE).exists() {
        std::fs::remove_dir_all(STATE).with_context(|| format!("cannot remove {STATE}"))?;
    }
    Ok(())
}

/// Whether process `pid` holds a lab, and is not another process that got the same number later.
fn is_holder(pid: u32) -> bool {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    line.split(|&byte| byte == 0).skip(1).take(2).eq([b"lab".as_slice(), b"hold".as_slice()])
}

fn enter(place: &str, command: &[String]) -> Result<()> {
    let name = format!("{PREFIX}{place}");
    ensure!(
        Path::new(RUN_NETNS).join(&name).exists(),
        "the lab has no `{place}`; `cargo xtask lab up` makes `host`, `guest-0` and so on"
    );
    let mut inside = Command::new("ip");
    inside.args(["netns", "exec", &name]);
    if command.is_empty() {
        eprintln!("inside {place}; leave with `exit`");
        inside.arg(std::env::var_os("SHELL").unwrap_or_else(|| "/bin/sh".into()));
    } else {
        inside.args(command);
    }
    bail!("cannot run ip: {}", inside.exec())
}
