//! The verbs of `cargo xtask` that show xdp-imds. They build quickly, because they compile no part of the agent.

mod lab;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use clap::{Parser, Subcommand};
use metadata_common::mac::Mac;
use serde_json::{Value, json};
use shell::{tools, verbs};
use testbed::agent::{self, Agent, DROPPED, IMPOSTOR, PASSED, PortArgument, STEERED};
use testbed::answers::PATHS;
use testbed::guest::{Guest, METADATA, Route, Spec};
use testbed::host::{self, Host};
use testbed::netns::Namespace;
use testbed::record::Identity;
use testbed::tap::Shape;

#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    #[command(about = verbs::DEMO)]
    Demo(Args),
    #[command(about = verbs::LAB)]
    Lab(lab::Args),
}

fn main() -> ExitCode {
    shell::exit_code(match Cli::parse().verb {
        Verb::Demo(args) => run(&args),
        Verb::Lab(args) => lab::run(args),
    })
}

// `cargo xtask demo`: guests on real taps ask the real agent. Each guest gets its own metadata, an impostor gets
// nothing, and all other traffic is unaffected.

/// The most guests of a demo: each takes a namespace and a thread.
const MAX_GUESTS: u16 = 64;
/// Pings from each guest to each of its two peers.
const PINGS: u32 = 20;
/// The longest time one request may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long the impostor keeps asking: enough for three SYNs.
const IMPOSTOR_ASKS: Duration = Duration::from_secs(4);
/// A MAC that no record has.
const FORGED: Mac = Mac([0x52, 0x54, 0x00, 0xba, 0xdb, 0xad]);

/// The size of the demo and the form of its result.
#[derive(clap::Args)]
struct Args {
    /// Number of honest guests; the demo adds one impostor
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(3..=i64::from(MAX_GUESTS)))]
    guests: u16,
    /// Print the result as JSON on standard output (progress always goes to standard error)
    #[arg(long)]
    json: bool,
    /// The agent to run, instead of the one that `cargo xtask` builds for the demo
    #[arg(long)]
    agent: Option<PathBuf>,
}

/// Runs the verb.
fn run(args: &Args) -> Result<()> {
    shell::go_on_as_root(&[])?;
    let agent = args.agent.clone().map_or_else(agent::binary, Ok)?;
    tools::ensure(tools::LAB)?;
    let report = show(args.guests, &agent)?;
    if args.json {
        println!("{:#}", report.json());
    } else {
        print!("{}", report.text());
    }
    let wrong = report.wrong();
    ensure!(wrong.is_empty(), "the demo failed:\n  {}", wrong.join("\n  "));
    eprintln!("every guest got its own metadata, the impostor got none, and everything is cleaned up");
    Ok(())
}

fn show(count: u16, agent: &Path) -> Result<DemoReport> {
    let started = Instant::now();
    let progress = |what: &str| eprintln!("[{:>5.1} s] {what}", started.elapsed().as_secs_f64());

    progress(&format!(
        "create a node in a namespace of its own: bridge {} with {}",
        host::BRIDGE,
        host::ADDRESS
    ));
    let host = Host::new()?;
    let records = tempfile::tempdir()?;
    progress(&format!("boot {count} guests and an impostor, each a Linux stack on a real tap with offloads"));
    let guests = boot(&host, count, records.path())?;
    let (impostor, honest) = guests.split_last().context("there is no impostor")?;

    progress("start xdp-imds: load XDP, attach it to every tap, serve");
    let ports: Vec<_> =
        guests.iter().map(|guest| PortArgument::new(guest.host_tap().name(), guest.identity().mac)).collect();
    let running = Agent::start_binary(agent, host.ns(), agent::arguments(records.path(), &ports))?;

    progress(&format!(
        "every guest asks http://{METADATA} with curl, while all ping each other and the gateway"
    ));
    let (asked, pings) = std::thread::scope(|scope| {
        let pings = scope.spawn(|| ping(honest));
        let asked: Vec<_> = honest.iter().map(ask).collect();
        (asked, pings.join().expect("pinging does not panic"))
    });
    let pings = pings?;

    progress(&format!(
        "the impostor asks for {} s with a MAC that is not its tap's",
        IMPOSTOR_ASKS.as_secs()
    ));
    // Only a timeout counts as a refusal; curl may fail for other reasons, which prove nothing.
    let refused = impostor
        .fetch(PATHS[0], IMPOSTOR_ASKS)
        .is_err_and(|error| format!("{error:#}").contains("timed out"));

    let verdicts = running.metrics()?.verdicts().map(|(name, frames)| (name.to_owned(), frames)).collect();
    let links =
        honest.iter().map(|guest| Link::read(host.ns(), guest.host_tap().name())).collect::<Result<_>>()?;
    progress("stop xdp-imds");
    let status = running.stop()?;
    if !status.success() {
        bail!("the agent ended with {status}");
    }
    let program_left = host.ns().ip("link")?.contains("xdp");
    Ok(DemoReport { asked, refused, verdicts, pings, links, program_left })
}

/// Boots the honest guests, then the impostor. Every second honest guest reaches the metadata address through its
/// gateway.
fn boot(host: &Host, count: u16, records: &Path) -> Result<Vec<Guest>> {
    let mut guests = Vec::new();
    for number in 0..=count {
        let identity = Identity::of(number).with_user_data_of(256 << (number % 8));
        identity.write(records, 1)?;
        let impostor = number == count;
        let spec = Spec {
            mac: if impostor { FORGED } else { identity.mac },
            route: if impostor || number % 2 == 1 { Route::Gateway } else { Route::OnLink },
            shape: Shape::virtio(),
            ..Spec::of(&identity)
        };
        guests.push(Guest::boot(host, &spec)?);
    }
    Ok(guests)
}

/// Lets a guest fetch all of its documents. A failure is part of the result.
fn ask(guest: &Guest) -> DemoAnswer {
    let mut asked =
        DemoAnswer { guest: guest.identity().clone(), bytes: 0, time: Duration::ZERO, error: None };
    for path in PATHS {
        match guest.fetch_own(path, PATIENCE) {
            Ok(fetched) => {
                asked.bytes += fetched.body.len();
                asked.time += fetched.time;
            }
            Err(error) => {
                asked.error = Some(format!("{error:#}"));
                break;
            }
        }
    }
    asked
}

/// Each guest pings the gateway and the next guest.
fn ping(guests: &[Guest]) -> Result<Pings> {
    let mut pings = Pings { sent: 0, answered: 0 };
    for (number, guest) in guests.iter().enumerate() {
        let neighbour = guests[(number + 1) % guests.len()].identity().address;
        for to in [host::ADDRESS, neighbour] {
            pings.sent += PINGS;
            pings.answered += guest.ping(to, PINGS)?;
        }
    }
    Ok(pings)
}

// The result of a demo, as tables and as JSON.

/// What a demo measured.
pub(crate) struct DemoReport {
    pub(crate) asked: Vec<DemoAnswer>,
    /// Whether the impostor's requests timed out.
    pub(crate) refused: bool,
    /// Frames by the kernel's verdict.
    pub(crate) verdicts: Vec<(String, u64)>,
    pub(crate) pings: Pings,
    pub(crate) links: Vec<Link>,
    /// Whether an XDP program was still attached to a tap after the agent stopped.
    pub(crate) program_left: bool,
}

/// The result of one guest.
pub(crate) struct DemoAnswer {
    pub(crate) guest: Identity,
    /// Bytes of all bodies together.
    pub(crate) bytes: usize,
    /// Time of all requests together, with connection set-up.
    pub(crate) time: Duration,
    pub(crate) error: Option<String>,
}

/// Pings among guests and the gateway, which the agent must not affect.
pub(crate) struct Pings {
    pub(crate) sent: u32,
    pub(crate) answered: u32,
}

/// The counters of one tap.
pub(crate) struct Link {
    name: String,
    received: u64,
    sent: u64,
    errors: u64,
}

impl Link {
    /// Reads the counters of `name` with `ip -s link`.
    pub(crate) fn read(ns: &Namespace, name: &str) -> Result<Self> {
        let shown: Value = serde_json::from_str(&ns.ip(&format!("-j -s link show dev {name}"))?)?;
        let stats = &shown[0]["stats64"];
        let count = |way: &str, what: &str| {
            stats[way][what]
                .as_u64()
                .with_context(|| format!("`ip -j -s link` shows no {way} {what} of {name}"))
        };
        Ok(Self {
            name: name.to_owned(),
            received: count("rx", "packets")?,
            sent: count("tx", "packets")?,
            errors: count("rx", "errors")? + count("tx", "errors")?,
        })
    }
}

impl DemoReport {
    fn frames(&self, beginning: &str) -> u64 {
        self.verdicts.iter().filter(|(name, _)| name.starts_with(beginning)).map(|(_, frames)| frames).sum()
    }

    /// One sentence for each expectation that was not met; empty after a good demo.
    pub(crate) fn wrong(&self) -> Vec<String> {
        let mut wrong: Vec<String> = self.asked.iter().filter_map(|asked| asked.error.clone()).collect();
        if !self.refused {
            wrong.push("the impostor was answered".into());
        }
        if self.frames(IMPOSTOR) == 0 {
            wrong.push(format!("the impostor's frames are not counted as {IMPOSTOR}"));
        }
        if self.frames(STEERED) == 0 || self.frames(PASSED) == 0 {
            wrong.push(
                "the kernel counted no steered or no passed frames, so its programs did not see the traffic"
                    .into(),
            );
        }
        if self.pings.answered != self.pings.sent {
            wrong.push(format!("{} of {} pings were answered", self.pings.answered, self.pings.sent));
        }
        for link in self.links.iter().filter(|link| link.errors > 0) {
            wrong.push(format!("{} has {} errors", link.name, link.errors));
        }
        if self.program_left {
            wrong.push("an XDP program stayed on a tap after the agent stopped".into());
        }
        wrong
    }

    /// The result as tables for people.
    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        self.write(&mut text).expect("writing to a String cannot fail");
        text
    }

    fn write(&self, out: &mut String) -> std::fmt::Result {
        writeln!(
            out,
            "\n{:<10} {:<36} {:>9} {:>7} {:>7}  ",
            "guest", "instance-id", "user-data", "bytes", "ms"
        )?;
        for DemoAnswer { guest, bytes, time, error } in &self.asked {
            let ms = time.as_secs_f64() * 1_000.0;
            let verdict = error.as_deref().unwrap_or("ok");
            let (name, id, data) = (&guest.hostname, &guest.instance_id, guest.user_data.len());
            writeln!(out, "{name:<10} {id:<36} {data:>9} {bytes:>7} {ms:>7.1}  {verdict}")?;
        }
        let impostor = if self.refused { "got nothing" } else { "WAS ANSWERED" };
        writeln!(out, "{:<10} {impostor}", "impostor")?;

        writeln!(out, "\n{:<28} {:>9}", "the kernel's verdicts", "frames")?;
        for (name, frames) in self.verdicts.iter().filter(|(_, frames)| *frames > 0) {
            writeln!(out, "  {name:<26} {frames:>9}")?;
        }
        for (what, beginning) in [("steered", STEERED), ("dropped", DROPPED), ("passed", PASSED)] {
            writeln!(out, "{what:<28} {:>9}", self.frames(beginning))?;
        }

        writeln!(out, "\nother traffic: {} of {} pings answered", self.pings.answered, self.pings.sent)?;
        for Link { name, received, sent, errors } in &self.links {
            writeln!(out, "  {name:<10} received {received:>6}  sent {sent:>6}  errors {errors}")?;
        }
        writeln!(out)
    }

    /// The result as JSON for programs.
    pub(crate) fn json(&self) -> Value {
        let asked = |asked: &DemoAnswer| {
            json!({
                "hostname": asked.guest.hostname,
                "instance_id": asked.guest.instance_id,
                "user_data_bytes": asked.guest.user_data.len(),
                "bytes": asked.bytes,
                "ms": asked.time.as_secs_f64() * 1_000.0,
                "error": asked.error,
            })
        };
        let link = |link: &Link| json!({"name": link.name, "received": link.received, "sent": link.sent, "errors": link.errors});
        json!({
            "guests": self.asked.iter().map(asked).collect::<Vec<_>>(),
            "impostor_refused": self.refused,
            "verdicts": self.verdicts.iter().cloned().collect::<std::collections::BTreeMap<_, _>>(),
            "pings": {"sent": self.pings.sent, "answered": self.pings.answered},
            "links": self.links.iter().map(link).collect::<Vec<_>>(),
            "program_left": self.program_left,
            "wrong": self.wrong(),
        })
    }
}
