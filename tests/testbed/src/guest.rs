//! A simulated guest: a Linux network stack in its own namespace, behind a real tap.

use crate::answers;
use crate::eventually;
use crate::host::{self, Host};
use crate::netns::Namespace;
use crate::pump::{Faults, Moved, Pump, Recent, Wire};
use crate::record::Identity;
use crate::tap::{Backend, Shape, Tap};
use anyhow::{Context as _, Result, bail, ensure};
use metadata_common::mac::Mac;
use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The metadata address that every guest uses.
pub const METADATA: Ipv4Addr = Ipv4Addr::new(169, 254, 169, 254);
/// The NIC's name inside the guest.
pub const NIC: &str = "eth0";

/// Limit for getting an IPv6 address. Only a failing test waits this long.
const ADDRESS_WITHIN: Duration = Duration::from_secs(10);

/// How a guest sends to the metadata address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Route {
    /// It resolves the metadata address by ARP, like a guest with a link-local route.
    #[default]
    OnLink,
    /// It has only a default route, so frames carry the gateway's MAC.
    Gateway,
}

/// Properties of a guest that a test may vary.
#[derive(Clone, Debug)]
pub struct Spec {
    /// The identity in its record: tap, MAC and address.
    pub identity: Identity,
    /// MAC of its NIC; one that differs from the record's makes the guest an impostor.
    pub mac: Mac,
    /// IPv4 address of its NIC.
    pub address: Ipv4Addr,
    /// Its route to the metadata address.
    pub route: Route,
    /// Shape of the tap on both sides.
    pub shape: Shape,
    /// How its frames travel to and from its tap.
    pub backend: Backend,
    /// Faults of frames it sends.
    pub to_host: Faults,
    /// Faults of frames it receives.
    pub to_guest: Faults,
    /// Seed of the faults.
    pub seed: u64,
    /// Buffer for its last segments, and the instant from which their times count.
    pub recent: Option<(Arc<Mutex<Recent>>, Instant)>,
}

impl Spec {
    /// A guest with its record's addresses, a plain tap and no faults.
    #[must_use]
    pub fn of(identity: &Identity) -> Self {
        Self {
            identity: identity.clone(),
            mac: identity.mac,
            address: identity.address,
            route: Route::default(),
            shape: Shape::default(),
            backend: Backend::default(),
            to_host: Faults::default(),
            to_guest: Faults::default(),
            seed: u64::from(identity.number),
            recent: None,
        }
    }
}

/// Runs curl with these arguments in a guest's namespace.
///
/// # Errors
/// Like [`Guest::fetch`].
pub fn curl_in(ns: &Namespace, words: &[&str], patience: Duration) -> Result<Fetched> {
    let seconds = patience.as_secs_f64().to_string();
    let mut command = Command::new("curl");
    // --noproxy: a proxy of the test machine must never receive a guest's request.
    command.args(["-sS", "--noproxy", "*", "--max-time", &seconds, "--write-out"]);
    command.arg("%{stderr}%{http_code} %{time_total}").args(words);
    let started = Instant::now();
    let output = ns.output(&mut command)?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        bail!("curl {}: {} after {:?}", words.join(" "), stderr.trim(), started.elapsed());
    }
    let mut report = stderr.split_whitespace();
    let status = report.next().and_then(|code| code.parse().ok());
    let seconds = report.next().and_then(|time| time.parse().ok());
    Ok(Fetched {
        status: status.with_context(|| format!("curl gave no status: {stderr}"))?,
        time: Duration::from_secs_f64(seconds.with_context(|| format!("curl gave no time: {stderr}"))?),
        body: output.stdout,
    })
}

/// A running guest. Drop removes its tap, its namespace and its pump.
#[derive(Debug)]
pub struct Guest {
    // Fields are dropped in this order: the pump, the tap that it shares, the namespace.
    pump: Pump,
    host_tap: Arc<Tap>,
    ns: Namespace,
    identity: Identity,
}

impl Guest {
    /// Boots a guest on a new tap of the host.
    ///
    /// # Errors
    /// Fails if its tap, namespace or addresses cannot be created.
    pub fn boot(host: &Host, spec: &Spec) -> Result<Self> {
        let tap = host.tap(&spec.identity, spec.shape)?;
        Self::boot_on(tap, Namespace::new("guest")?, spec)
    }

    /// Boots a guest on an existing tap, in an existing namespace.
    ///
    /// # Errors
    /// Fails if its NIC or addresses cannot be created.
    pub fn boot_on(host_tap: Arc<Tap>, ns: Namespace, spec: &Spec) -> Result<Self> {
        if spec.backend == Backend::VhostNet {
            host_tap.attach_vhost()?;
        }
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

    /// The identity in its record.
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

    /// Counts of the frames it sent.
    #[must_use]
    pub fn sent(&self) -> Moved {
        self.pump.to_host(0)
    }

    /// Counts of the frames it received.
    #[must_use]
    pub fn got(&self) -> Moved {
        self.pump.to_guest(0)
    }

    /// Fetches a path of the metadata service with curl, for at most `patience`.
    ///
    /// # Errors
    /// Fails if curl fails (no answer, broken connection, timeout) or its report cannot be parsed.
    pub fn fetch(&self, path: &str, patience: Duration) -> Result<Fetched> {
        self.curl(&[&format!("http://{METADATA}{path}")], patience)
    }

    /// Fetches one of [`answers::PATHS`] and checks the answer against the guest's record.
    ///
    /// # Errors
    /// Like [`Guest::fetch`]; also fails if the answer differs from the record.
    pub fn fetch_own(&self, path: &str, patience: Duration) -> Result<Fetched> {
        let fetched = self.fetch(path, patience)?;
        answers::check(&self.identity, path, fetched.status, &fetched.body)?;
        Ok(fetched)
    }

    /// Enables IPv6 on its NIC and waits for the link-local address. Without it the kernel would choose `::1` as the
    /// source of a connection and keep it (`ipv6_dev_get_saddr`, net/ipv6/addrconf.c).
    ///
    /// # Errors
    /// Fails if its namespace has no IPv6, or the address does not appear within 10 s.
    pub fn enable_ipv6(&self) -> Result<()> {
        // Duplicate address detection would delay the address by a second.
        for (name, value) in [("accept_dad", "0"), ("disable_ipv6", "0")] {
            self.ns.sysctl(&format!("ipv6/conf/{NIC}/{name}"), value)?;
        }
        eventually(ADDRESS_WITHIN, || {
            let mut command = Command::new("ip");
            command.args(["-6", "address", "show", "dev", NIC, "scope", "link", "-tentative"]);
            let output = self.ns.output(&mut command)?;
            let addresses = String::from_utf8_lossy(&output.stdout);
            ensure!(addresses.contains("inet6"), "{NIC} has no usable link-local address");
            Ok(())
        })
    }

    /// Runs curl with these arguments inside the guest.
    ///
    /// # Errors
    /// Like [`Guest::fetch`].
    pub fn curl(&self, words: &[&str], patience: Duration) -> Result<Fetched> {
        curl_in(&self.ns, words, patience).with_context(|| self.identity.hostname.clone())
    }

    /// Pings an address. Returns how many of the first `count` requests got a reply. The option `-w` makes ping wait
    /// longer than 20 ms for the last reply. With it, ping also sends further requests until `count` replies have
    /// arrived.
    ///
    /// # Errors
    /// Fails if ping cannot run or its report cannot be parsed.
    pub fn ping(&self, to: Ipv4Addr, count: u32) -> Result<u32> {
        let mut command = Command::new("ping");
        // 5 s, and five intervals for each request.
        let deadline = 5 + count.div_ceil(10);
        command.args(["-n", "-i", "0.02", "-w", &deadline.to_string(), "-c", &count.to_string()]);
        let output = self.ns.output(command.arg(to.to_string()))?;
        let report = String::from_utf8_lossy(&output.stdout);
        ensure!(
            report.contains("packets transmitted"),
            "ping printed {report}{}",
            String::from_utf8_lossy(&output.stderr)
        );
        let words = report.split_whitespace();
        let numbers = words.filter_map(|word| word.strip_prefix("icmp_seq=")?.parse::<u32>().ok());
        Ok(numbers.filter(|number| *number <= count).collect::<BTreeSet<_>>().len() as u32)
    }

    /// Sends `len` bytes to an echo server and checks that they come back unchanged.
    ///
    /// # Errors
    /// Fails if the connection fails, stalls for [`host::PATIENCE`], or returns other bytes.
    pub fn echo(&self, server: SocketAddr, len: usize) -> Result<()> {
        let mut sent = vec![0; len];
        fastrand::Rng::with_seed(len as u64).fill(&mut sent);
        let returned = self.ns.run_in(|| -> std::io::Result<Vec<u8>> {
            let stream = TcpStream::connect_timeout(&server, host::PATIENCE)?;
            stream.set_read_timeout(Some(host::PATIENCE))?;
            stream.set_write_timeout(Some(host::PATIENCE))?;
            std::thread::scope(|scope| {
                // Send and receive at the same time; otherwise both ends would block on full buffers.
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
            "{server} returned {} bytes that differ from the {len} sent",
            returned.len()
        );
        Ok(())
    }
}

/// An answer that curl received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fetched {
    /// The HTTP status.
    pub status: u16,
    /// The body.
    pub body: Vec<u8>,
    /// Total time as measured by curl.
    pub time: Duration,
}

impl Fetched {
    /// The body as text; invalid UTF-8 becomes replacement characters.
    #[must_use]
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

// The unit by which a guest reacts to what its host announces, as the book's page of events installs it.

/// The page of the book that shows the unit.
const EVENTS_PAGE: &str = include_str!("../../../docs/src/operate/events.md");

/// The `#cloud-config` that the page shows.
///
/// # Errors
/// If the page shows none.
pub fn event_unit_config() -> Result<&'static str> {
    let blocks = EVENTS_PAGE.split("```yaml\n").skip(1).filter_map(|rest| rest.split("```").next());
    let found = blocks.into_iter().find(|block| block.starts_with("#cloud-config\n"));
    found.context("docs/src/operate/events.md has no block of YAML that starts with #cloud-config")
}

/// A file that the `#cloud-config` writes.
///
/// # Errors
/// If it writes no such file.
pub fn event_unit_file(path: &str) -> Result<String> {
    let config: serde_json::Value = serde_yaml::from_str(event_unit_config()?)?;
    let mut files = config["write_files"].as_array().into_iter().flatten();
    let content = files.find(|file| file["path"] == path).and_then(|file| file["content"].as_str());
    Ok(content
        .with_context(|| format!("the #cloud-config of docs/src/operate/events.md writes no {path}"))?
        .to_owned())
}
