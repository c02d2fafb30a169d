//! `cargo xtask traffic`: measures what steering costs guests' other traffic, by program and kind of frame.
//!
//! One guest on a real tap with offloads, in a namespace of its own, sends through a bridge to a neighbour that does
//! not answer. With `--pod`, the path leads out of a pod through one of KubeVirt's bindings (see `way`). The kernel
//! does all of this within the guest's `write(2)`, so the sender's CPU time is that of the whole system. Programs
//! alternate on the same tap, in every round.

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use shell::tools;
use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use support::netns;
use support::netns::Namespace;
use support::tap::{Shape, Tap, VNET_HDR_LEN};
use support::variants::{Variant, Variants};

/// The most rounds. Each takes about a third of a second.
const MAX_ROUNDS: u16 = 2_000;
/// Frames sent without measurement after each change of program.
const WARM_UP: u32 = 200;

/// The number of rounds, the path and the form of the result.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Number of measurements of each program with each kind of frame
    #[arg(long, default_value_t = 101, value_parser = clap::value_parser!(u16).range(1..=i64::from(MAX_ROUNDS)))]
    rounds: u16,
    /// Put the tap into a pod with this binding, and the neighbour behind the node's bridge
    #[arg(long, value_name = "BINDING", num_args = 0..=1, default_missing_value = "bridge")]
    pod: Option<Binding>,
    /// Print the result as JSON on standard output (progress always goes to standard error)
    #[arg(long)]
    json: bool,
    /// Also draw the result as a bar chart
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// Runs the verb.
pub(crate) fn run(args: &Args) -> Result<()> {
    shell::go_on_as_root(&[])?;
    tools::ensure(tools::LAB)?;
    let report = measure(args.rounds, args.pod)?;
    if let Some(file) = &args.svg {
        fs::write(file, report.svg()).with_context(|| format!("cannot write {}", file.display()))?;
    }
    if args.json {
        println!("{:#}", report.json());
    } else {
        print!("{}", report.text());
    }
    Ok(())
}

fn measure(rounds: u16, pod: Option<Binding>) -> Result<TrafficReport> {
    let way = Way::lay(pod)?;
    let (ns, tap) = (way.ns(), way.tap());
    let mut variants = Variants::load(ns, tap.name())?;
    let mut samples = vec![Vec::with_capacity(rounds.into()); FrameKind::ALL.len() * Variant::ALL.len()];
    for round in 0..usize::from(rounds) {
        if round.is_multiple_of(5) {
            eprintln!("round {} of {rounds}", round + 1);
        }
        for turn in 0..Variant::ALL.len() {
            // Each round begins with another program, so that none always follows the same one.
            let at = (turn + round) % Variant::ALL.len();
            let taken = variants.with(Variant::ALL[at], || {
                FrameKind::ALL.iter().map(|kind| cost(tap, *kind)).collect::<Result<Vec<_>>>()
            });
            let taken = taken.with_context(|| format!("with {}", Variant::ALL[at].name()))?;
            for (kind, nanos) in taken.into_iter().enumerate() {
                samples[kind * Variant::ALL.len() + at].push(nanos);
            }
        }
    }
    let arrived = sink_frames(way.end())?;
    let sent: u64 = FrameKind::ALL.iter().map(|kind| u64::from(WARM_UP + kind.frames())).sum::<u64>()
        * u64::from(rounds)
        * Variant::ALL.len() as u64;
    ensure!(
        arrived >= sent,
        "only {arrived} of {sent} frames reached the neighbour, so the costs are not valid"
    );
    let cells =
        FrameKind::ALL.iter().flat_map(|kind| Variant::ALL.iter().map(move |variant| (*kind, *variant)));
    let rows =
        cells.zip(samples).map(|((kind, variant), nanos)| TrafficRow::new(kind, variant, nanos)).collect();
    TrafficReport::new(way.name(), rounds, rows)
}

/// Returns the CPU time of the whole system for one frame of a kind, in nanoseconds.
fn cost(tap: &Tap, kind: FrameKind) -> Result<f64> {
    let frame = kind.frame();
    send(tap, &frame, WARM_UP)?;
    let before = own_cpu()?;
    send(tap, &frame, kind.frames())?;
    Ok((own_cpu()? - before) as f64 / f64::from(kind.frames()))
}

fn send(tap: &Tap, frame: &[u8], times: u32) -> Result<()> {
    for _ in 0..times {
        ensure!(tap.send(0, frame)?, "the tap refused a frame, although no queue is on its path");
    }
    Ok(())
}

/// Returns the CPU time of this thread in nanoseconds (Linux: Documentation/scheduler/sched-stats.rst).
fn own_cpu() -> Result<u64> {
    // Yielding updates the value, which the tick does only every few milliseconds.
    std::thread::yield_now();
    let shown =
        fs::read_to_string("/proc/thread-self/schedstat").context("cannot read this thread's CPU time")?;
    let first = shown.split_whitespace().next().context("schedstat is empty")?;
    Ok(first.parse()?)
}

/// Returns the number of frames that reached the neighbour. A frame of many segments counts once.
fn sink_frames(ns: &Namespace) -> Result<u64> {
    let shown: Value = serde_json::from_str(&ns.ip("-j -s link show dev far0")?)?;
    shown[0]["stats64"]["rx"]["packets"].as_u64().context("`ip -j -s link` shows no received frames")
}

// The frames of a guest's ordinary traffic.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FrameKind {
    /// The shortest frames, such as acknowledgements and DNS.
    Small,
    /// Frames of a full MTU.
    Full,
    /// Frames of 60 KB that the kernel or the NIC cuts into segments, as in every bulk transfer.
    Tso,
}

/// Bytes of Ethernet, IPv4 and TCP headers without options.
const HEADERS: usize = 54;
/// Bytes of payload in a segment with an MTU of 1,500.
const MSS: u16 = 1_460;

impl FrameKind {
    /// All kinds.
    pub(crate) const ALL: [Self; 3] = [Self::Small, Self::Full, Self::Tso];

    /// Returns the name of the kind in tables.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Small => "64 B",
            Self::Full => "1514 B",
            Self::Tso => "60 KB TSO",
        }
    }

    /// Returns the bytes of a frame without the virtio header.
    const fn len(self) -> usize {
        match self {
            Self::Small => 64,
            Self::Full => 1_514,
            Self::Tso => HEADERS + 41 * MSS as usize,
        }
    }

    /// Returns the number of frames of one measurement, which takes a few milliseconds.
    pub(crate) const fn frames(self) -> u32 {
        match self {
            Self::Small | Self::Full => 3_000,
            Self::Tso => 1_000,
        }
    }

    /// Returns a TCP segment to a neighbour behind its virtio header. The host computes the checksum, as for most
    /// guests.
    pub(crate) fn frame(self) -> Vec<u8> {
        const NEEDS_CHECKSUM: u8 = 1;
        const TCP_OVER_IPV4: u8 = 1;
        let (kind, segment) = if self == Self::Tso { (TCP_OVER_IPV4, MSS) } else { (0, 0) };
        let mut frame = Vec::with_capacity(VNET_HDR_LEN + self.len());
        frame.extend([NEEDS_CHECKSUM, kind]);
        // Length of the headers, bytes of a segment, start and offset of the checksum (virtio 1.3 §5.1.6).
        for field in [HEADERS as u16, segment, 34, 16] {
            frame.extend(field.to_le_bytes());
        }
        frame.extend([0x52, 0x54, 0, 0, 0, 2, 0x52, 0x54, 0, 0, 0, 1, 0x08, 0x00]);
        let datagram = (self.len() - 14) as u16;
        let mut words = [0x4500, datagram, 1, 0x4000, 0x4006, 0, 0x0a00, 0x020f, 0x0a00, 0x0210_u16];
        // A bridge that filters drops packets with a wrong header checksum (RFC 1071).
        let sum: u32 = words.iter().map(|word| u32::from(*word)).sum();
        words[5] = !((sum & 0xffff) + (sum >> 16)) as u16;
        frame.extend(words.iter().flat_map(|word| word.to_be_bytes()));
        // Ports 40000 to 5001, sequence and acknowledgement numbers, 20 bytes of header, ACK.
        frame.extend([0x9c, 0x40, 0x13, 0x89, 0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x10, 0xff, 0xff, 0, 0, 0, 0]);
        frame.resize(VNET_HDR_LEN + self.len(), 0x5a);
        frame
    }
}

// The path from a guest's tap to a neighbour.
//
// ```text
//  none         tap0 ── br0 ── veth ── neighbour
//  bridge       tap0 ── br0 ── veth │ br0 ── veth ── neighbour
//  masquerade   tap0 ── br0 (router, NAT) ── veth │ br0 ── veth ── neighbour
//                             the pod │ the node
// ```

/// The binding by which KubeVirt connects a VM's NIC with its pod's
/// (<https://kubevirt.io/user-guide/network/interfaces_and_networks/>).
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Binding {
    /// A bridge connects the tap and the pod's NIC
    Bridge,
    /// The pod routes, and translates the VM's address to its own
    Masquerade,
}

/// A bridge, and a veth pair on it.
const BRIDGE: &str = "link add br0 type bridge\nlink add sink0 type veth peer name far0\n\
                      link set sink0 up\nlink set br0 up\n";
/// The guest's router, and the route to its neighbour.
const ROUTER: &str = "link set br0 address 52:54:00:00:00:02\naddr add 10.0.2.1/28 dev br0\n\
                      addr add 10.9.0.1/24 dev sink0\nroute add 10.0.2.16/32 dev sink0\n\
                      neigh add 10.0.2.16 lladdr 52:54:00:00:00:03 dev sink0\n";
/// The rules of KubeVirt's masquerade binding, without its counters.
const NAT: &str = "add table ip nat
    add chain ip nat prerouting { type nat hook prerouting priority -100; }
    add chain ip nat postrouting { type nat hook postrouting priority 100; }
    add rule ip nat prerouting iifname sink0 dnat to 10.0.2.15
    add rule ip nat postrouting ip saddr 10.0.2.15 masquerade";

/// The namespaces, tap and bridges of a path. They are deleted when it is dropped.
pub(crate) struct Way {
    binding: Option<Binding>,
    ns: Namespace,
    node: Option<Namespace>,
    tap: Tap,
}

impl Way {
    /// Makes the path for a guest 10.0.2.15. Its neighbour is 10.0.2.16 and is reached at 52:54:00:00:00:02.
    pub(crate) fn lay(binding: Option<Binding>) -> Result<Self> {
        let ns = Namespace::new("traffic")?;
        let tap = Tap::create(&ns, "tap0", Shape::virtio())?;
        ns.ip_batch(&format!("{BRIDGE}link set tap0 master br0\nlink set tap0 up\n"))?;
        if binding == Some(Binding::Masquerade) {
            tools::ensure(&[("nft", "nftables")])?;
            ns.sysctl("ipv4/ip_forward", "1")?;
            ns.ip_batch(ROUTER)?;
            ns.run_in(|| netns::run(Command::new("nft").arg(NAT)))?;
        } else {
            ns.ip("link set sink0 master br0")?;
        }
        let node = binding.map(|_| Namespace::new("node")).transpose()?;
        if let Some(node) = &node {
            ns.ip(&format!("link set far0 netns {} name pod0", node.name()))?;
            node.ip_batch(&format!(
                "{BRIDGE}link set sink0 master br0\nlink set pod0 master br0\nlink set pod0 up\n"
            ))?;
        }
        let way = Self { binding, ns, node, tap };
        way.end().ip("link set far0 up")?;
        Ok(way)
    }

    /// Returns a few words for titles.
    pub(crate) const fn name(&self) -> &'static str {
        match self.binding {
            None => "through a bridge",
            Some(Binding::Bridge) => "out of a pod by a bridge",
            Some(Binding::Masquerade) => "out of a pod by masquerade",
        }
    }

    /// Returns the namespace of the tap.
    pub(crate) const fn ns(&self) -> &Namespace {
        &self.ns
    }

    /// Returns the namespace of the neighbour.
    pub(crate) fn end(&self) -> &Namespace {
        self.node.as_ref().unwrap_or(&self.ns)
    }

    /// Returns the guest's tap.
    pub(crate) const fn tap(&self) -> &Tap {
        &self.tap
    }
}

// The results as a table, as JSON and as a bar chart.

/// The results of one run, and the machine they belong to.
pub(crate) struct TrafficReport {
    kernel: String,
    cores: usize,
    commit: String,
    way: &'static str,
    rounds: u16,
    rows: Vec<TrafficRow>,
}

/// The results of one program with one kind of frame.
pub(crate) struct TrafficRow {
    kind: FrameKind,
    variant: Variant,
    /// CPU nanoseconds per frame in each round.
    rounds: Vec<f64>,
}

impl TrafficRow {
    /// Makes a row of the measurements of all rounds, in order.
    pub(crate) fn new(kind: FrameKind, variant: Variant, rounds: Vec<f64>) -> Self {
        Self { kind, variant, rounds }
    }

    fn median(&self) -> f64 {
        quantile(&self.rounds, 0.5)
    }
}

/// Returns the value below which the fraction `part` of the values lies. The values may be in any order.
fn quantile(values: &[f64], part: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let at = (sorted.len().saturating_sub(1) as f64 * part).round() as usize;
    sorted.get(at).copied().unwrap_or(f64::NAN)
}

impl TrafficReport {
    /// Makes a report, with kernel, cores and commit of this machine.
    pub(crate) fn new(way: &'static str, rounds: u16, rows: Vec<TrafficRow>) -> Result<Self> {
        let kernel =
            fs::read_to_string("/proc/sys/kernel/osrelease").context("cannot read the kernel release")?;
        let output =
            Command::new("git").args(["rev-parse", "--short", "HEAD"]).current_dir(shell::top()).output();
        let commit = output.ok().filter(|output| output.status.success()).map_or_else(
            || "unknown".to_owned(),
            |output| String::from_utf8_lossy(&output.stdout).trim().to_owned(),
        );
        let cores = std::thread::available_parallelism()?.get();
        Ok(Self { kernel: kernel.trim().to_owned(), cores, commit, way, rounds, rows })
    }

    /// Returns the cost as a multiple of the cost without a program. It is the median of the ratios within each round,
    /// so that a slow round does not affect it.
    fn ratio(&self, row: &TrafficRow) -> f64 {
        let Some(bare) = self.rows.iter().find(|r| r.kind == row.kind && r.variant == Variant::None) else {
            return f64::NAN;
        };
        let ratios: Vec<f64> =
            row.rounds.iter().zip(&bare.rounds).map(|(with, without)| with / without).collect();
        quantile(&ratios, 0.5)
    }

    /// Returns the results as a table.
    pub(crate) fn text(&self) -> String {
        let Self { kernel, cores, commit, way, rounds, .. } = self;
        let mut text = format!(
            "CPU time of the whole system per ordinary frame that a guest sends, {way}\n\
             Linux {kernel}, {cores} cores, commit {commit}, {rounds} rounds: median, quartiles\n\n\
             {:<10} {:<12} {:>9} {:>19} {:>10}\n",
            "frame", "program", "ns", "quartiles", "ratio"
        );
        for row in &self.rows {
            let [low, high] = [0.25, 0.75].map(|part| quantile(&row.rounds, part));
            let _ = writeln!(
                text,
                "{:<10} {:<12} {:>9.0} {:>19} {:>10.3}",
                row.kind.name(),
                row.variant.name(),
                row.median(),
                format!("{low:.0} – {high:.0}"),
                self.ratio(row)
            );
        }
        text
    }

    /// Returns the results as JSON, with every round.
    pub(crate) fn json(&self) -> Value {
        let rows: Vec<Value> = self
            .rows
            .iter()
            .map(|row| {
                json!({
                    "frame": row.kind.name(),
                    "program": row.variant.name(),
                    "median_ns": row.median(),
                    "quartiles_ns": [quantile(&row.rounds, 0.25), quantile(&row.rounds, 0.75)],
                    "ratio": self.ratio(row),
                    "rounds_ns": row.rounds,
                })
            })
            .collect();
        json!({
            "kernel": self.kernel, "cores": self.cores, "commit": self.commit, "way": self.way, "rounds": self.rounds,
            "rows": rows,
        })
    }

    /// Returns a bar chart with a bar for each row, as long as its ratio.
    pub(crate) fn svg(&self) -> String {
        const BAR: usize = 18;
        const LEFT: usize = 190;
        const UNIT: f64 = 300.0;
        let height = self.rows.len() * BAR + 50;
        let mut svg = format!(
            "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 800 {height}' font-family='sans-serif' \
             font-size='12'>\n<text x='8' y='20'>CPU time per ordinary frame, relative to no program, {} (Linux {}, {} rounds)</text>\n",
            self.way, self.kernel, self.rounds
        );
        for (n, row) in self.rows.iter().enumerate() {
            let ratio = self.ratio(row);
            let (y, width) = (34 + n * BAR, (ratio * UNIT).clamp(0.0, 540.0));
            let colour = match row.variant {
                Variant::None | Variant::Empty => "#999",
                Variant::Native => "#c33",
                Variant::Generic => "#e90",
                Variant::Tcx => "#393",
                Variant::TcxInPod => "#36c",
            };
            let _ = writeln!(
                svg,
                "<text x='8' y='{}'>{}, {}</text><rect x='{LEFT}' y='{y}' width='{width:.1}' height='{}' \
                 fill='{colour}'/><text x='{:.1}' y='{}'>{ratio:.2} ({:.0} ns)</text>",
                y + 12,
                row.kind.name(),
                row.variant.name(),
                BAR - 3,
                LEFT as f64 + width + 6.0,
                y + 12,
                row.median()
            );
        }
        svg + "</svg>\n"
    }
}

#[cfg(test)]
mod tests {
    use support::tap::VNET_HDR_LEN;

    use super::{FrameKind, TrafficReport, TrafficRow, Variant, quantile};

    #[test]
    fn a_frame_has_the_length_of_its_kind() {
        for (kind, len) in [(FrameKind::Small, 64), (FrameKind::Full, 1_514), (FrameKind::Tso, 59_914)] {
            assert_eq!(kind.frame().len(), VNET_HDR_LEN + len, "{kind:?}");
        }
    }

    #[test]
    fn quantiles_are_measured_values() {
        let values = [5.0, 1.0, 4.0, 2.0, 3.0];
        assert_eq!([0.0, 0.25, 0.5, 1.0].map(|part| quantile(&values, part)), [1.0, 2.0, 3.0, 5.0]);
    }

    #[test]
    fn a_slow_round_does_not_change_the_ratio() {
        let row = |variant, rounds: [f64; 3]| TrafficRow::new(FrameKind::Tso, variant, rounds.to_vec());
        let rows =
            vec![row(Variant::None, [100.0, 1_000.0, 100.0]), row(Variant::Tcx, [110.0, 1_100.0, 110.0])];
        let report = TrafficReport::new("through a bridge", 3, rows).expect("this machine is known");
        assert!((report.ratio(&report.rows[1]) - 1.1).abs() < 1e-9);
        let json = report.json();
        assert_eq!(json["rows"][1]["program"], "tcx");
        assert!(report.text().contains("1.100") && report.svg().contains("1.10 (110 ns)"));
    }
}
