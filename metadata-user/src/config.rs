//! The configuration file and its defaults.
//!
//! Every field has a default, so a file states only what differs. Command line options override the file.
//!
//! ```yaml
//! records: /etc/xdp-imds/records.d
//! ports:
//! - {ifname: vnet0, mac: "52:54:00:12:34:56"}
//! - {ifname: tap0, netns: /proc/4242/ns/net}
//! addresses: [169.254.169.254, "fd00:ec2::254"]   # replaces the default list
//! limits: {frames_per_second: 10000, burst: 2048, connections_per_second: 200, connection_burst: 512}
//! metadata: {keys: 16, chars: 256}
//! api: {group: vmm}
//! audit: {to: /var/log/xdp-imds/audit.log, sample: 16, max_megabytes: 64, keep: 4}
//! identity: {issuer: "https://imds.example.org", keys: /etc/xdp-imds/identity}
//! ```
mod read;
mod sections;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::service::audit::AuditConfig;
use metadata_common::addresses;
use metadata_common::run::DEFAULT_RUN;
use metadata_content::record;
#[cfg(feature = "kubevirt")]
use metadata_feed::kubevirt;
use metadata_feed::{memory_budget, openstack, proxmox};
use metadata_steer::{ClosedTaps, PortLimits, SteeringMode};

use crate::logging::LogFormat;

pub use read::{ConfigError, PortSpec, socket_address, workers};
pub use sections::{ApiConfig, IdentityConfig, MetadataLimits, Sandbox};

/// Default of `state`.
pub const DEFAULT_STATE: &str = "/var/lib/xdp-imds";

/// Default of `pins`: a directory on the bpffs that systemd mounts.
pub const DEFAULT_PINS: &str = "/sys/fs/bpf/xdp-imds";

/// Largest value of `drain_seconds`.
pub const DRAIN_SECONDS_MOST: u32 = 3_600;
/// Largest value of `rotate_token_key_days`, and of `identity.rotate_days`.
pub const ROTATE_DAYS_MOST: u32 = 3_650;
/// Largest value of `spin_us`.
pub const SPIN_US_MOST: u32 = 1_000_000;

/// Most names in `page_hosts`.
pub const PAGE_HOSTS: usize = 16;

/// The configuration of the agent.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Directory of VM records, one file per VM. Default: none. A directory is required here or on the command line,
    /// unless `api`, `kubevirt`, `openstack` or `proxmox` is present.
    pub records: Option<PathBuf>,
    /// Registration of VMs at the control socket, which is always open. If this section is present, even empty
    /// (`{}`), the agent starts without a directory of records.
    pub api: Option<ApiConfig>,
    /// Ports that the agent serves in addition to those that records name.
    pub ports: Vec<PortSpec>,
    /// Metadata addresses served on every port, at most [`metadata_common::maps::MAX_SERVED`] per address family.
    /// Default: [`addresses::ALL`]. A list here replaces the default. Frames to an address that is not in the list
    /// pass unchanged.
    pub addresses: Vec<IpAddr>,
    /// Next hops through which guests route to a served address. The agent answers ARP for these IPv4 addresses and
    /// lets IP packets to them pass. They count towards the limit of `addresses`. Default (`None`):
    /// [`addresses::SCALEWAY_NEXT_HOP`] if [`addresses::SCALEWAY`] is served, otherwise none.
    pub arp_only: Option<Vec<Ipv4Addr>>,
    /// How much one port may send to the metadata service. The kernel enforces the limits.
    pub limits: PortLimits,
    /// Memory limit for all rendered records, in bytes or as text (`"512MiB"`), from [`memory_budget::LEAST_BYTES`] to
    /// [`memory_budget::MOST_BYTES`]. Records beyond the limit are refused. Default (`None`): the control group's
    /// memory limit when the configuration is read, less the agent's own needs, or [`memory_budget::DEFAULT_BYTES`]
    /// without such a limit.
    #[serde(deserialize_with = "read::bytes_field")]
    pub record_memory: Option<usize>,
    /// Limits of a record's custom `metadata`. Records that exceed them are refused.
    pub metadata: MetadataLimits,
    /// The program that steers the ports. Default: `auto`, which costs guests least (measured
    /// with `cargo xtask traffic`).
    pub steer: SteeringMode,
    /// Which taps without a record are closed. A closed tap forwards no frame to a metadata address. `all` closes taps
    /// in the agent's namespace and in those with served ports; `none` is the default. Do not use `all` if two agents
    /// share a namespace: each would close the other's taps.
    pub guard: ClosedTaps,
    /// Prefix of the hub's device names, 1 to 11 bytes. Agents in the same namespace need different prefixes.
    pub hub: String,
    /// Address and port that serve Prometheus metrics; `None` (default) serves none.
    pub metrics: Option<SocketAddr>,
    /// Whether `/` of `metrics` is a page with the live view of the node: names, ports and MACs of VMs, and the paths
    /// that they ask for. Everybody who reaches the address sees it. `false` by default.
    pub page: bool,
    /// Further names by which browsers reach the page, such as that of a proxy: the page answers only requests whose
    /// `Host` is an IP address, `localhost`, the node's name or one of these, at most [`PAGE_HOSTS`]. Default: none.
    pub page_hosts: Vec<String>,
    /// The audit log of requests; off by default.
    pub audit: AuditConfig,
    /// The issuer of identity tokens, which others can verify; `None` (default) issues none.
    pub identity: Option<IdentityConfig>,
    /// Directory for token keys and data written by guests, which survive a restart. Created with mode 0700. With
    /// `null` nothing survives: tokens become invalid when the agent ends, and one-shot passwords are served again.
    pub state: Option<PathBuf>,
    /// Directory on a bpffs where links and maps are pinned. While no agent runs, pins keep ports closed and preserve
    /// the guests' slots. `null` pins nothing: all programs leave the taps when the agent ends. Agents on the same node
    /// need different directories.
    pub pins: Option<PathBuf>,
    /// Directory for the sockets of the running agent. Created with mode 0700. Agents on the same node need different
    /// directories.
    pub run: PathBuf,
    /// How long open requests may take after the agent receives a stop signal, in seconds, at most
    /// [`DRAIN_SECONDS_MOST`]; 0 closes all connections at once. A second signal ends the wait.
    pub drain_seconds: u32,
    /// Which lines the log has: `off`, `error`, `warn`, `info`, `debug` or `trace`, and levels of parts, such as
    /// `info,metadata_steer=debug`. `--log` overrides it. Default (`None`): `info`.
    pub log: Option<String>,
    /// The format of log lines, which `--log-format` overrides.
    pub log_format: LogFormat,
    /// File with a token key that several nodes share, so that tokens stay valid after a migration. The operator
    /// creates the key with `xdp-imds token-key`, distributes it and replaces it. Default: none. While
    /// the file does not exist, the agent uses the key in `state`.
    pub token_key: Option<PathBuf>,
    /// Age at which the token key is replaced, in days: 1 to [`ROTATE_DAYS_MOST`]. Tokens signed with the previous key
    /// stay valid until they expire.
    pub rotate_token_key_days: u32,
    /// How long an idle worker polls before it sleeps, in microseconds, at most [`SPIN_US_MOST`]. Polling uses CPU
    /// time. Only guests that send the next request within this time get faster answers.
    pub spin_us: u32,
    /// Whether the kernel answers frames that need no state, on ports that are taps. User space then receives little
    /// more than requests. With `false` all frames go to user space, and a capture on the hub shows them.
    pub answer_in_kernel: bool,
    /// Whether the kernel also answers requests with short answers that were published for the VM, on ports that are taps.
    /// Needs `answer_in_kernel`; `false` by default.
    pub answer_requests_in_kernel: bool,
    /// How long the kernel answers requests after an agent that was killed, in seconds: 3 to 3,600. Longer spares guests
    /// the wait for the next agent. For as long, they get what the records said when the agent was killed, with the
    /// `Date` of that second. An agent that ends orderly withdraws its answers at once. Needs
    /// `answer_requests_in_kernel`.
    #[serde(deserialize_with = "read::without_agent_field")]
    pub answer_without_agent_seconds: u32,
    /// Number of threads that answer guests, 1 to [`metadata_steer::HUBS_OF_A_SIDE`]. Each has its own hub and
    /// serves a part of the guests. Default: one for each 32 CPUs that the agent may use, rounded up; at most 8, and at
    /// most what an eighth of the memory limit has room for, but at least one.
    #[serde(deserialize_with = "read::workers_field")]
    pub workers: u32,
    /// How the agent finds and serves KubeVirt's VMs; `None` (default) turns this off.
    #[cfg(feature = "kubevirt")]
    pub kubevirt: Option<kubevirt::KubevirtOptions>,
    /// How the agent finds and serves the VMs of a Proxmox VE node; `None` (default) turns this off.
    pub proxmox: Option<proxmox::ProxmoxOptions>,
    /// How the agent finds and serves the instances of an OpenStack compute node; `None` (default) turns this off.
    pub openstack: Option<openstack::OpenstackOptions>,
    /// Whether the agent drops system calls and capabilities that serving does not need; `on` by default.
    pub sandbox: Sandbox,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            records: None,
            api: None,
            ports: Vec::new(),
            addresses: addresses::ALL.to_vec(),
            arp_only: None,
            limits: PortLimits::default(),
            steer: SteeringMode::default(),
            record_memory: None,
            metadata: MetadataLimits::default(),
            guard: ClosedTaps::default(),
            hub: "imds".into(),
            metrics: None,
            page: false,
            page_hosts: Vec::new(),
            audit: AuditConfig::default(),
            identity: None,
            state: Some(DEFAULT_STATE.into()),
            pins: Some(DEFAULT_PINS.into()),
            run: DEFAULT_RUN.into(),
            drain_seconds: 5,
            log: None,
            log_format: LogFormat::default(),
            token_key: None,
            rotate_token_key_days: 30,
            spin_us: 0,
            answer_in_kernel: true,
            answer_requests_in_kernel: false,
            answer_without_agent_seconds: read::WITHOUT_AGENT_MIN,
            workers: sections::by_default(),
            #[cfg(feature = "kubevirt")]
            kubevirt: None,
            proxmox: None,
            openstack: None,
            sandbox: Sandbox::On,
        }
    }
}

impl Config {
    /// Returns `api`, or its defaults if the section is absent.
    #[must_use]
    pub fn api(&self) -> ApiConfig {
        self.api.clone().unwrap_or_default()
    }

    /// Returns the memory limit for all records, in bytes: `record_memory` or its default.
    #[must_use]
    pub fn record_bytes(&self) -> usize {
        self.record_memory
            .unwrap_or_else(|| memory_budget::within(memory_budget::cgroup::memory_limit(), self.workers))
    }

    /// Returns the limits of one record, with those of `metadata`.
    #[must_use]
    pub fn record_limits(&self) -> record::RecordLimits {
        let MetadataLimits { keys, chars } = self.metadata;
        record::RecordLimits { metadata_keys: keys, metadata_chars: chars, ..record::RecordLimits::DEFAULT }
    }

    /// Returns the next hops for which ARP is answered: those of `arp_only`, or the default for `addresses`.
    #[must_use]
    pub fn next_hops(&self) -> Vec<Ipv4Addr> {
        match &self.arp_only {
            Some(configured) => configured.clone(),
            None if self.addresses.contains(&addresses::SCALEWAY.into()) => {
                vec![addresses::SCALEWAY_NEXT_HOP]
            }
            None => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use metadata_common::addresses;
    use metadata_steer::PortLimits;
    #[cfg(feature = "kubevirt")]
    use serde_json::Value;
    use std::net::{IpAddr, Ipv4Addr};
    use std::path::Path;

    use super::{ApiConfig, Config, DEFAULT_PINS, workers};

    #[test]
    fn each_sandbox_value_selects_its_mode_and_others_are_refused() {
        use metadata_datapath::sandbox::SandboxMode;
        for (text, mode) in [("on", SandboxMode::On), ("log", SandboxMode::Log), ("off", SandboxMode::Off)] {
            let config: Config = serde_yaml::from_str(&format!("sandbox: {text}")).expect(text);
            assert_eq!(SandboxMode::from(config.sandbox), mode);
        }
        assert!(serde_yaml::from_str::<Config>("sandbox: enforce").is_err());
    }

    #[test]
    fn an_empty_file_means_all_defaults() {
        for text in ["", "\n", "# nothing yet\n"] {
            assert_eq!(Config::parse(text).expect("defaults"), Config::default());
        }
    }

    #[test]
    fn the_kernel_answers_without_an_agent_for_three_seconds_to_an_hour() {
        let cases = [
            ("3", Some(3)),
            ("3600", Some(3_600)),
            ("2", None),
            ("3601", None),
            ("-1", None),
            ("long", None),
        ];
        for (text, expected) in cases {
            let config = Config::parse(&format!("answer_without_agent_seconds: {text}\n"));
            assert_eq!(config.ok().map(|config| config.answer_without_agent_seconds), expected, "{text}");
        }
    }

    #[test]
    fn workers_range_from_one_to_the_maximum_number_of_hubs() {
        let cases =
            [("1", Some(1)), ("32", Some(32)), ("0", None), ("33", None), ("-1", None), ("many", None)];
        for (text, expected) in cases {
            assert_eq!(workers(text).ok(), expected, "{text}");
            let config = Config::parse(&format!("workers: {text}\n"));
            assert_eq!(config.ok().map(|config| config.workers), expected, "{text}");
        }
    }

    #[test]
    fn record_memory_accepts_bytes_with_or_without_a_unit() {
        for (text, bytes) in [
            ("536870912", Some(Some(512 << 20))),
            ("512MiB", Some(Some(512 << 20))),
            ("2 GiB", Some(Some(2 << 30))),
            ("65536KiB", Some(Some(64 << 20))),
            ("null", Some(None)),
            ("512M", None),
            ("much", None),
            ("-1", None),
            ("99999999999999999999GiB", None),
        ] {
            let config = Config::parse(&format!("record_memory: {text}\n"));
            assert_eq!(config.ok().map(|config| config.record_memory), bytes, "{text}");
        }
    }

    #[test]
    fn null_turns_pins_off() {
        let cases = [
            ("hub: x\n", Some(DEFAULT_PINS)),
            ("pins: null\n", None),
            ("pins: /sys/fs/bpf/two\n", Some("/sys/fs/bpf/two")),
        ];
        for (text, pins) in cases {
            let config = Config::parse(text).expect(text);
            assert_eq!(config.pins.as_deref(), pins.map(Path::new), "{text}");
        }
    }

    #[test]
    fn fields_that_a_file_omits_have_their_defaults() {
        let config =
            Config::parse("limits: {burst: 7}\nports: [{ifname: t0, mac: '52:54:00:00:00:01'}]\n").unwrap();
        assert_eq!(config.limits, PortLimits { burst: 7, ..PortLimits::default() });
        assert_eq!(config.ports, ["t0=52:54:00:00:00:01".parse().unwrap()]);
    }

    #[test]
    fn addresses_in_the_file_replace_the_default_and_set_the_next_hop() {
        let cases: [(&str, usize, &[Ipv4Addr]); 4] = [
            ("hub: x\n", 9, &[addresses::SCALEWAY_NEXT_HOP]),
            ("addresses: [169.254.169.254, 'fd00:ec2::254']\n", 2, &[]),
            ("addresses: [169.254.42.42]\n", 1, &[addresses::SCALEWAY_NEXT_HOP]),
            ("addresses: [169.254.42.42]\narp_only: []\n", 1, &[]),
        ];
        for (text, served, next_hops) in cases {
            let config = Config::parse(text).expect(text);
            config.validate().expect(text);
            assert_eq!((config.addresses.len(), &config.next_hops()[..]), (served, next_hops), "{text}");
        }
    }

    #[test]
    fn metadata_limits_become_limits_of_a_record() {
        for (text, keys, chars) in [("hub: x\n", 16, 256), ("metadata: {keys: 64}\n", 64, 256)] {
            let config = Config::parse(text).expect(text);
            config.validate().expect(text);
            let limits = config.record_limits();
            assert_eq!((limits.metadata_keys, limits.metadata_chars), (keys, chars), "{text}");
        }
    }

    #[test]
    fn parse_errors_name_the_field_and_the_line() {
        let cases = [
            ("hub: x\nlimit: {}\n", "line 2", "limit"),
            ("hub: x\nsteer: tc\n", "line 2", "steer"),
            ("limits:\n  burst: -1\n", "line 2", "limits.burst"),
            ("ports:\n- {ifname: a-name-that-is-too-long}\n", "line 2", "ports[0]"),
            ("ports:\n- {ifname: t0, mac: '53:54:00:00:00:01'}\n", "line 2", "group address"),
        ];
        for (text, line, field) in cases {
            let error = Config::parse(text).expect_err(text).to_string();
            assert!(error.contains(line) && error.contains(field), "{text:?} gave: {error}");
        }
    }

    #[test]
    fn values_out_of_range_are_refused_by_field() {
        type Spoil = fn(&mut Config);
        let cases: [(&str, Spoil); 15] = [
            ("record_memory", |c| c.record_memory = Some(1 << 20)),
            ("rotate_token_key_days", |c| c.rotate_token_key_days = 0),
            ("audit.sample", |c| c.audit.sample = 0),
            ("addresses", |c| c.addresses.push("255.255.255.255".parse().unwrap())),
            ("addresses", |c| c.addresses.extend((1..=31).map(|n| IpAddr::from([10, 0, 0, n])))),
            ("arp_only", |c| c.arp_only = Some(vec![addresses::METADATA])),
            ("arp_only", |c| c.arp_only = Some(vec!["224.0.0.1".parse().unwrap()])),
            ("addresses", |c| c.addresses.push("0.0.0.0".parse().unwrap())),
            ("addresses", |c| c.addresses.push("ff02::1".parse().unwrap())),
            ("addresses", |c| c.addresses.push(addresses::METADATA.into())),
            ("hub", |c| c.hub = "x".repeat(12)),
            ("hub", |c| c.hub = "a/b".into()),
            ("addresses", |c| c.addresses.clear()),
            ("limits.burst", |c| c.limits.burst = 0),
            ("api.instances", |c| c.api = Some(ApiConfig { instances: 0, ..ApiConfig::default() })),
        ];
        for (field, spoil) in cases {
            let mut config = Config::default();
            spoil(&mut config);
            let error = config.validate().expect_err(field).to_string();
            assert!(error.starts_with(field), "{error}");
        }
    }

    #[test]
    fn a_port_is_listed_once_for_each_of_its_guests() {
        const PORT: &str = "expected each port with each MAC at most once";
        for (text, found) in [
            ("{ifname: t0, mac: '52:54:00:00:00:01'}, {ifname: t0, mac: '52:54:00:00:00:02'}", None),
            ("{ifname: t0, mac: '52:54:00:00:00:01'}, {ifname: t1, mac: '52:54:00:00:00:01'}", None),
            ("{ifname: t0}, {ifname: t0, netns: blue}, {ifname: t0, mac: '52:54:00:00:00:01'}", None),
            ("{ifname: t0}, {ifname: t1}, {ifname: t0}", Some("found t0 twice")),
            (
                "{ifname: t0, mac: '52:54:00:00:00:0A'}, {ifname: t0, mac: '52:54:00:00:00:0a'}",
                Some("found t0 with 52:54:00:00:00:0a twice"),
            ),
            ("{ifname: t0, netns: blue}, {ifname: t0, netns: blue}", Some("found t0 in blue twice")),
        ] {
            let config = Config::parse(&format!("ports: [{text}]\n")).expect(text);
            let error = config.validate().err().map(|error| error.to_string());
            let is_as_expected = match (&error, found) {
                (Some(error), Some(found)) => {
                    error.starts_with(&format!("ports: {PORT}")) && error.ends_with(found)
                }
                (error, found) => error.is_none() && found.is_none(),
            };
            assert!(is_as_expected, "{text}: {error:?}");
        }
    }

    /// The JSON pointers (RFC 6901) to all numbers of a document.
    #[cfg(feature = "kubevirt")]
    fn numbers(document: &Value, at: String) -> Vec<String> {
        match document {
            Value::Number(_) => vec![at],
            Value::Object(members) => {
                members.iter().flat_map(|(name, member)| numbers(member, format!("{at}/{name}"))).collect()
            }
            _ => Vec::new(),
        }
    }

    #[cfg(feature = "kubevirt")]
    #[test]
    fn each_number_has_a_bound_that_the_error_says() {
        let sections = "record_memory: 512MiB\nidentity: {issuer: 'https://a', keys: /k}\napi: {}\nkubevirt: {}\n\
                    proxmox: {}\nopenstack: {}\n";
        let config = Config::parse(sections).expect("all sections");
        config.validate().expect("all defaults");
        let document = serde_json::to_value(&config).expect("JSON");
        let numbers = numbers(&document, String::new());
        // A number in a section that is missing above would have no test.
        let fields = include_str!("../../docs/src/reference/configuration-fields.md").lines();
        let cells = fields.map(|line| line.split('|').map(str::trim).collect::<Vec<_>>());
        for cells in cells.filter(|cells| cells.get(2) == Some(&"number")) {
            let name = cells[1].replace('`', "");
            assert!(numbers.iter().any(|pointer| pointer.ends_with(&format!("/{name}"))), "{name}");
        }
        for pointer in numbers {
            let refused = |number: u64| {
                let mut document = document.clone();
                *document.pointer_mut(&pointer).expect("a number") = number.into();
                let read = Config::parse(&document.to_string()).map_err(|error| error.to_string());
                read.and_then(|config| config.validate().map_err(|error| error.to_string())).err()
            };
            // 32 bits of memory are little.
            let error = refused(u32::MAX.into()).or_else(|| refused(i64::MAX as u64)).expect(&pointer);
            let field = pointer[1..].replace('/', ".");
            let bound = ["at most ", " to ", " or "].iter().any(|word| {
                error.split_once(word).is_some_and(|(_, rest)| rest.starts_with(|c: char| c.is_ascii_digit()))
            });
            assert!(error.contains(&field) && bound, "{field}: {error}");
        }
    }

    #[test]
    fn settings_of_openstack_that_exclude_each_other_are_refused() {
        for (text, refused) in [
            ("{}", None),
            ("{southbound: 'tcp:10.0.0.1:6642', chassis: n1}", None),
            ("{instances: libvirt}", None),
            ("{instances: libvirt, domains: /run/elsewhere}", None),
            (
                "{domains: /run/elsewhere}",
                Some("openstack.domains: expected nothing, or `instances: libvirt`"),
            ),
            ("{instances: libvirt, ovsdb: 'tcp:10.0.0.1:6640'}", Some("openstack.ovsdb: expected nothing")),
            (
                "{instances: libvirt, southbound: 'tcp:10.0.0.1:6642'}",
                Some("openstack.southbound: expected nothing"),
            ),
            ("{instances: libvirt, tls: {ca: /ca.pem}}", Some("openstack.tls: expected nothing")),
            ("{instances: libvirt, chassis: n1}", Some("asks no database")),
        ] {
            let config = Config::parse(&format!("openstack: {text}\n")).expect(text);
            let found = config.validate().err().map(|error| error.to_string());
            let is_as_expected = match (&found, refused) {
                (Some(found), Some(words)) => found.contains(words),
                (found, refused) => found.is_none() && refused.is_none(),
            };
            assert!(is_as_expected, "{text}: {found:?}");
        }
        assert!(Config::parse("openstack: {instances: ovs}\n").is_err());
    }
}
