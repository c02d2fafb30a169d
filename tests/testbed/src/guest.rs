//! A pretend guest of the middle kind: a Linux network stack in a namespace of its own, behind a true tap.

use crate::answers;
use crate::eventually::eventually;
use crate::host::{self, Host};
use crate::netns::Namespace;
use crate::pump::{Faults, Moved, Pump, Wire};
use crate::recent::Recent;
use crate::record::Identity;
use crate::tap::{Shape, Tap};
use anyhow::{Context as _, Result, bail, ensure};
use metadata_common::mac::Mac;
use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The address every guest asks.
pub const METADATA: Ipv4Addr = Ipv4Addr::new(169, 254, 169, 254);
/// The NIC's name inside the guest.
pub const NIC: &str = "eth0";

/// Longest until a NIC has its own IPv6 address: generous, since it is waited out only in failure.
const ADDRESS_WITHIN: Duration = Duration::from_secs(10);

/// How a guest sends to the metadata address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Route {
    /// It asks for the metadata address by ARP, as a guest with a link-local route does.
    #[default]
    OnLink,
    /// It has only a default route, so frames carry the gateway's MAC.
    Gateway,
}

/// Everything about a guest that a test may vary.
#[derive(Clone, Debug)]
pub struct Spec {
    /// Who it is on paper: its record, tap and address.
    pub identity: Identity,
    /// The address its NIC really has; another than the record's makes it an impostor.
    pub mac: Mac,
    /// The IPv4 address it gave itself.
    pub address: Ipv4Addr,
    /// How it reaches the metadata address.
    pub route: Route,
    /// The shape of its tap, on both sides.
    pub shape: Shape,
    /// Bad luck of what it sends.
    pub to_host: Faults,
    /// Bad luck of what it gets.
    pub to_guest: Faults,
    /// Seed of that luck.
    pub seed: u64,
    /// Where its last segments are noted, and since when their times count.
    pub recent: Option<(Arc<Mutex<Recent>>, Instant)>,
}

impl Spec {
    /// An honest guest with a plain tap and no bad luck.
    #[must_use]
    pub fn of(identity: &Identity) -> Self {
        Self {
            identity: identity.clone(),
            mac: identity.mac,
            address: identity.address,
            route: Route::default(),
            shape: Shape::default(),
            to_host: Faults::default(),
            to_guest: Faults::default(),
            seed: u64::from(identity.number),
            recent: None,
        }
    }
}

/// Runs curl with these words inside the namespace of a guest.
///
/// # Errors
/// As for [`Guest::fetch`].
pub fn curl_in(ns: &Namespace, words: &[&str], patience: Duration) -> Result<Fetched> {
    let seconds = patience.as_secs_f64().to_string();
    let mut command = Command::new("curl");
    // --noproxy: a proxy of the machine running the test must never see a guest's request.
    command.args(["-sS", "--noproxy", "*", "--max-time", &seconds, "--write-out"]);
    command.arg("%{stderr}%{http_code} %{time_total}").args(words);
    let started = Instant::now();
    let output = ns.output(&mut command)?;
    let said = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        bail!("curl {}: {} after {:?}", words.join(" "), said.trim(), started.elapsed());
    }
    let mut report = said.split_whitespace();
    let status = report.next().and_then(|code| code.parse().ok());
    let seconds = report.next().and_then(|time| time.parse().ok());
    Ok(Fetched {
        status: status.with_context(|| format!("curl gave no status: {said}"))?,
        time: Duration::from_secs_f64(seconds.with_context(|| format!("curl gave no time: {said}"))?),
        body: output.stdout,
    })
}

/// A running guest. Dropping it unplugs it: its tap, its namespace and its pump go.
#[derive(Debug)]
pub struct Guest {
    // The pump goes first, then the taps it shares, then the namespace they are in.
    pump: Pump,
    host_tap: Arc<Tap>,
    ns: Namespace,
    identity: Identity,
}

impl Guest {
    /// Boots a guest on a tap the host makes for it.
    ///
    /// # Errors
    /// When its tap, namespace or addresses cannot be made.
    pub fn boot(host: &Host, spec: &Spec) -> Result<Self> {
        let tap = host.tap(&spec.identity, spec.shape)?;
        Self::boot_on(tap, Namespace::new("guest")?, spec)
    }

    /// Boots a guest on a tap somebody made, in a namespace somebody made.
    ///
    /// # Errors
    /// When its NIC or addresses cannot be made.
    pub fn boot_on(host_tap: Arc<Tap>, ns: Namespace, spec: &Spec) -> Result<Self> {
        ns.sysctl("ipv6/conf/default/disable_ipv6", "1")?;
        let nic = Tap::create(&ns, NIC, host_tap.shape())?;
        nic.set_mac(spec.mac)?;
        let gateway = host::ADDRESS;
        let metadata = match spec.route {
            Route::OnLink => format!("route add {METADATA} dev {NIC} scope link\n"),
            Route::Gateway => String::new(),
        };
        ns.ip_batch(&format!(
            "link set {NIC} up\naddr add {}/16 dev {NIC}\nroute add default via {gateway}\n{metadata}",
            spec.address
        ))?;
        let wire = Wire {
            guest: Arc::new(nic),
            host: Arc::clone(&host_tap),
            to_host: spec.to_host,
            to_guest: spec.to_guest,
            seed: spec.seed,
            recent: spec.recent.clone(),
        };
        let pump = Pump::start(vec![wire])?;
        Ok(Self { pump, host_tap, ns, identity: spec.identity.clone() })
    }

    /// Who it is on paper.
    #[must_use]
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Its namespace.
    #[must_use]
    pub fn ns(&self) -> &Namespace {
        &self.ns
    }

    /// The host's side of its NIC.
    #[must_use]
    pub fn host_tap(&self) -> &Tap {
        &self.host_tap
    }

    /// Frames it sent, as far as its host took them.
    #[must_use]
    pub fn sent(&self) -> Moved {
        self.pump.to_host(0)
    }

    /// Frames it got.
    #[must_use]
    pub fn got(&self) -> Moved {
        self.pump.to_guest(0)
    }

    /// Fetches a path of the metadata service with curl, giving up after `patience`.
    ///
    /// # Errors
    /// When curl fails (no answer, connection broken, time over) or its report cannot be read.
    pub fn fetch(&self, path: &str, patience: Duration) -> Result<Fetched> {
        self.curl(&[&format!("http://{METADATA}{path}")], patience)
    }

    /// Fetches one of [`answers::PATHS`] and checks that the answer is this guest's own.
    ///
    /// # Errors
    /// As for [`Guest::fetch`], and when the answer is not what its record says.
    pub fn fetch_own(&self, path: &str, patience: Duration) -> Result<Fetched> {
        let fetched = self.fetch(path, patience)?;
        answers::check(&self.identity, path, fetched.status, &fetched.body)?;
        Ok(fetched)
    }

    /// Gives its NIC IPv6, and waits until it has its link-local address: until then the kernel would send from `::1`
    /// (`ipv6_dev_get_saddr`, net/ipv6/addrconf.c), and stay with that for a connection.
    ///
    /// # Errors
    /// When its namespace has no IPv6, or the address does not come.
    pub fn enable_ipv6(&self) -> Result<()> {
        // Without duplicate address detection, which would make the address wait for a second.
        for (name, value) in [("accept_dad", "0"), ("disable_ipv6", "0")] {
            self.ns.sysctl(&format!("ipv6/conf/{NIC}/{name}"), value)?;
        }
        eventually(ADDRESS_WITHIN, || {
            let mut command = Command::new("ip");
            command.args(["-6", "address", "show", "dev", NIC, "scope", "link", "-tentative"]);
            let output = self.ns.output(&mut command)?;
            let addresses = String::from_utf8_lossy(&output.stdout);
            ensure!(addresses.contains("inet6"), "{NIC} has no link-local address that is ready");
            Ok(())
        })
    }

    /// Runs curl with these words inside the guest.
    ///
    /// # Errors
    /// As for [`Guest::fetch`].
    pub fn curl(&self, words: &[&str], patience: Duration) -> Result<Fetched> {
        curl_in(&self.ns, words, patience).with_context(|| self.identity.hostname.clone())
    }

    /// Pings an address; how many of the first `count` echoes come back. Without a deadline ping would give the last
    /// of them no more than 20 ms; with one it goes on until `count` have come.
    ///
    /// # Errors
    /// When ping cannot be run or its report cannot be read.
    pub fn ping(&self, to: Ipv4Addr, count: u32) -> Result<u32> {
        let mut command = Command::new("ping");
        // Seconds: each may take five times its interval.
        let deadline = 5 + count.div_ceil(10);
        command.args(["-n", "-i", "0.02", "-w", &deadline.to_string(), "-c", &count.to_string()]);
        let output = self.ns.output(command.arg(to.to_string()))?;
        let said = String::from_utf8_lossy(&output.stdout);
        ensure!(
            said.contains("packets transmitted"),
            "ping said {said}{}",
            String::from_utf8_lossy(&output.stderr)
        );
        let words = said.split_whitespace();
        let numbers = words.filter_map(|word| word.strip_prefix("icmp_seq=")?.parse::<u32>().ok());
        Ok(numbers.filter(|number| *number <= count).collect::<BTreeSet<_>>().len() as u32)
    }

    /// Sends `len` octets to an echo server and checks that the same come back.
    ///
    /// # Errors
    /// When the connection fails, stands still for [`host::PATIENCE`], or gives back anything else.
    pub fn echo(&self, server: SocketAddr, len: usize) -> Result<()> {
        let mut sent = vec![0; len];
        fastrand::Rng::with_seed(len as u64).fill(&mut sent);
        let returned = self.ns.run_in(|| -> std::io::Result<Vec<u8>> {
            let stream = TcpStream::connect_timeout(&server, host::PATIENCE)?;
            stream.set_read_timeout(Some(host::PATIENCE))?;
            stream.set_write_timeout(Some(host::PATIENCE))?;
            std::thread::scope(|scope| {
                // Both ways at once, or both ends would wait with full buffers.
                let writer = scope.spawn(|| {
                    (&stream).write_all(&sent)?;
                    stream.shutdown(std::net::Shutdown::Write)
                });
                let mut returned = Vec::with_capacity(sent.len());
                (&stream).read_to_end(&mut returned)?;
                writer.join().expect("the writer does not panic")?;
                Ok(returned)
            })
        });
        let returned = returned.with_context(|| format!("{} to {server}", self.identity.hostname))?;
        ensure!(
            returned == sent,
            "{server} gave back {} octets that differ from the {len} sent",
            returned.len()
        );
        Ok(())
    }
}

/// An answer curl got.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fetched {
    /// The HTTP status.
    pub status: u16,
    /// The body.
    pub body: Vec<u8>,
    /// From start to end, as curl counts it.
    pub time: Duration,
}

impl Fetched {
    /// The body as text; octets that are none show as replacement characters.
    #[must_use]
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}
