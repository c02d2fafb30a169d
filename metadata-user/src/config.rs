//! The configuration file and its defaults.
//!
//! Everything has a default; a file names only what differs. Command line options win over the file.
//!
//! ```yaml
//! records: /etc/xdp-imds/records.d
//! ports:
//! - {ifname: vnet0, mac: "52:54:00:12:34:56"}
//! - {ifname: tap0, netns: /proc/4242/ns/net}
//! addresses: [169.254.169.254, "fd00:ec2::254"]   # these, and none of the others served by default
//! limits: {frames_per_second: 10000, burst: 2048, connections_per_second: 200, connection_burst: 512}
//! metadata: {keys: 16, chars: 256}
//! api: {group: vmm}
//! audit: {to: /var/log/xdp-imds/audit.log, sample: 16, max_megabytes: 64, keep: 4}
//! ```

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use metadata_common::mac::Mac;
use metadata_common::maps;
use serde::Deserialize;
use tracing_subscriber::EnvFilter;

use metadata_base::addresses;
use metadata_base::port::{MAX_IFNAME, PortName, is_ifname};
use metadata_base::run::DEFAULT_RUN;
use metadata_content::record;
use metadata_datapath::sandbox;
#[cfg(feature = "kubevirt")]
use metadata_feed::kubevirt;
use metadata_feed::registry::MAX_RECORDS;
use metadata_feed::room;
use metadata_serve::audit::AuditConfig;
use metadata_steer::{Guarded, HUB_PREFIX_MAX, HUBS_OF_A_SIDE, Limits, Mode};

/// Where state is kept unless the configuration says otherwise.
pub const DEFAULT_STATE: &str = "/var/lib/xdp-imds";

/// Where links and maps are pinned unless the configuration says otherwise: below the bpffs that systemd mounts.
pub const DEFAULT_PINS: &str = "/sys/fs/bpf/xdp-imds";

/// What the agent runs with.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Directory of VM records, one file each. Default: none; must come from here or the command line, unless there is
    /// `api`.
    pub records: Option<PathBuf>,
    /// Registration of VMs at the control socket, which is there in any case. Named here, though it be empty (`{}`), it
    /// does without a directory of records.
    pub api: Option<ApiConfig>,
    /// Ports to own besides those that records name.
    pub ports: Vec<PortSpec>,
    /// Metadata addresses served on every port, at most [`maps::MAX_SERVED`] of a family. Default:
    /// [`addresses::ALL`], each with what asks there. A list here replaces the default, so that an address
    /// left out stays whoever's it is: frames for it pass untouched, which the kernel decides.
    pub addresses: Vec<IpAddr>,
    /// IPv4 addresses for which ARP is answered while IP sent to them passes: next hops that guests are told
    /// to reach a served address by. They count with `addresses`. Default (`None`):
    /// [`addresses::SCALEWAY_NEXT_HOP`] where [`addresses::SCALEWAY`] is served, else none.
    pub arp_only: Option<Vec<Ipv4Addr>>,
    /// What one port may send towards the service; enforced in the kernel.
    pub limits: Limits,
    /// Memory that all records may take, rendered, in octets or as text (`"512MiB"`), at least
    /// [`room::LEAST_OCTETS`]. Records beyond are refused. Default (`None`): what [`room::within`] leaves of the control
    /// group's memory limit, as it is when the configuration is read; [`room::DEFAULT_OCTETS`] without one.
    #[serde(deserialize_with = "read_octets")]
    pub record_memory: Option<usize>,
    /// How much a record's custom `metadata` may hold; records with more are refused.
    pub metadata: MetadataLimits,
    /// By which program ports are steered; `auto` by default, which `cargo xtask traffic` shows to cost guests
    /// least.
    pub steer: Mode,
    /// Which taps without a record are closed, so that nothing for a metadata address leaves them: `all`, in the agent's
    /// namespace and those it serves ports in, or `none` (default). Not for an agent that shares its namespace with
    /// another: it would close the other's taps.
    pub guard: Guarded,
    /// Prefix of the hub's device names, 1 to 11 octets; two agents in one namespace need two.
    pub hub: String,
    /// Where to serve Prometheus metrics; `None` (default) serves none.
    pub metrics: Option<SocketAddr>,
    /// Where requests are written down; nowhere by default.
    pub audit: AuditConfig,
    /// Directory of what outlives the agent: token keys, and what guests wrote. Made with mode 0700.
    /// `null` keeps nothing: tokens end with the agent, and one-shot passwords are given out again.
    pub state: Option<PathBuf>,
    /// Directory on a bpffs below which links and maps are pinned, so that ports stay closed and guests keep their slots
    /// while no agent runs. `null` pins nothing: when the agent ends, taps are as if there never was one. Two
    /// agents on a node need two.
    pub pins: Option<PathBuf>,
    /// Directory of sockets by which the running agent is reached. Made with mode 0700. Two agents on a node need two.
    pub run: PathBuf,
    /// How long an agent that is stopped serves what is going on, in seconds; 0 cuts all off at once. A second signal
    /// ends the wait.
    pub drain_seconds: u32,
    /// What to log, as `--log`, which wins; `None` is `info`.
    pub log: Option<String>,
    /// File with the token key of several nodes, made by `xdp-imds token-key` and looked after by others, so that tokens hold
    /// after a migration. Default: none; without it, or until it is there, the key in `state` counts.
    pub token_key: Option<PathBuf>,
    /// Age at which the token key is replaced, in days; tokens of the last one stay good until they expire.
    pub rotate_token_key_days: u32,
    /// How long a worker with nothing to do keeps polling before it sleeps, in microseconds. The kernel wakes it
    /// as fast as anybody, so this pays only for guests that ask again within that time, and costs them its CPU.
    pub spin_us: u32,
    /// Let the kernel answer what needs no memory on ports that are taps, so that user space sees little more
    /// than requests. `false` steers everything, which a capture on the hub then shows.
    pub answer_in_kernel: bool,
    /// Threads that answer, 1 to [`HUBS_OF_A_SIDE`], each with a hub of its own, among which the guests are spread.
    #[serde(deserialize_with = "read_workers")]
    pub workers: u32,
    /// How VMs of KubeVirt are found and served; `None` (default) looks for none.
    #[cfg(feature = "kubevirt")]
    pub kubevirt: Option<kubevirt::Options>,
    /// Whether the agent gives up system calls and capabilities that serving does not need; `on` by default.
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
            limits: Limits::default(),
            steer: Mode::default(),
            record_memory: None,
            metadata: MetadataLimits::default(),
            guard: Guarded::default(),
            hub: "imds".into(),
            metrics: None,
            audit: AuditConfig::default(),
            state: Some(DEFAULT_STATE.into()),
            pins: Some(DEFAULT_PINS.into()),
            run: DEFAULT_RUN.into(),
            drain_seconds: 5,
            log: None,
            token_key: None,
            rotate_token_key_days: 30,
            spin_us: 0,
            answer_in_kernel: true,
            workers: 1,
            #[cfg(feature = "kubevirt")]
            kubevirt: None,
            sandbox: Sandbox::On,
        }
    }
}

/// Reads `workers`, a number from 1 to [`HUBS_OF_A_SIDE`].
///
/// # Errors
/// When it is anything else.
pub fn workers(text: &str) -> Result<u32, String> {
    let number = text.parse().ok().filter(|number| (1..=HUBS_OF_A_SIDE).contains(number));
    number.ok_or_else(|| format!("expected a number of workers from 1 to {HUBS_OF_A_SIDE}, found `{text}`"))
}

/// Octets, as a number or with a unit: `KiB`, `MiB` or `GiB`.
fn octets(text: &str) -> Result<usize, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let shift = match text[digits..].trim_start() {
        "" => Some(0),
        "KiB" => Some(10),
        "MiB" => Some(20),
        "GiB" => Some(30),
        _ => None,
    };
    let number = text[..digits].parse::<usize>().ok();
    let octets = number.zip(shift).and_then(|(number, shift)| number.checked_mul(1 << shift));
    octets.ok_or_else(|| format!("expected octets such as 536870912 or `512MiB`, found `{text}`"))
}

fn read_octets<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Option<usize>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "octets such as 536870912 or `512MiB`")]
    enum Written {
        Number(usize),
        Text(String),
    }
    match Option::<Written>::deserialize(from)? {
        None => Ok(None),
        Some(Written::Number(number)) => Ok(Some(number)),
        Some(Written::Text(text)) => octets(&text).map(Some).map_err(serde::de::Error::custom),
    }
}

/// What becomes of system calls and capabilities that serving does not need.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Sandbox {
    /// They fail.
    On,
    /// They succeed, and the kernel logs each one (audit type 1326), which shows what a filter lacks.
    Log,
    /// There is no filter, and the agent keeps its capabilities.
    Off,
}

impl From<Sandbox> for sandbox::Mode {
    fn from(word: Sandbox) -> Self {
        match word {
            Sandbox::On => Self::On,
            Sandbox::Log => Self::Log,
            Sandbox::Off => Self::Off,
        }
    }
}

fn read_workers<'de, D: serde::Deserializer<'de>>(from: D) -> Result<u32, D::Error> {
    let number = i64::deserialize(from)?;
    workers(&number.to_string()).map_err(serde::de::Error::custom)
}

/// `metadata`: the policy for custom keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MetadataLimits {
    /// Keys of one VM, 16 by default, at most [`record::Limits::METADATA_KEYS_MOST`].
    pub keys: usize,
    /// Characters of one key or value, 256 by default, at most [`record::Limits::METADATA_CHARS_MOST`].
    pub chars: usize,
}

impl Default for MetadataLimits {
    fn default() -> Self {
        let record::Limits { metadata_keys, metadata_chars, .. } = record::Limits::DEFAULT;
        Self { keys: metadata_keys, chars: metadata_chars }
    }
}

/// `api`: who may register VMs, and how many.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ApiConfig {
    /// A group of `/etc/group`, or its number, that may use the control socket: the run directory is then its, with mode
    /// 2750. Default: none; the agent's user and root alone. Members decide what guests are told.
    pub group: Option<String>,
    /// Most VMs that are registered, [`MAX_RECORDS`] by default and at most.
    pub instances: usize,
}

impl Default for ApiConfig {
    fn default() -> Self {
        Self { group: None, instances: MAX_RECORDS }
    }
}

/// A port to own, and the MAC that may speak on it when no record names the port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortSpec {
    /// The port.
    pub name: PortName,
    /// The guest's MAC. Without it, identities come from records that name the port.
    pub mac: Option<Mac>,
}

/// What is wrong with a configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is not what it should be; the text names file, line and field.
    #[error("{}: {reason}", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// Field, line and reason.
        reason: String,
    },
    /// A value out of its range.
    #[error("{field}: expected {expected}, found {found}")]
    Value {
        /// The field.
        field: &'static str,
        /// What it must be.
        expected: String,
        /// What it is.
        found: String,
    },
}

impl Config {
    /// Reads a file and checks its values.
    ///
    /// # Errors
    /// The file cannot be read, has an unknown field, or a value is out of range.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.into(), source })?;
        let config = Self::parse(&text).map_err(|reason| ConfigError::Parse { path: path.into(), reason })?;
        match config.validate() {
            Ok(()) => Ok(config),
            Err(error) => Err(ConfigError::Parse { path: path.into(), reason: error.to_string() }),
        }
    }

    fn parse(text: &str) -> Result<Self, String> {
        // An empty document is null to YAML, and "all defaults" to a person.
        if text.lines().all(|line| line.trim().is_empty() || line.trim_start().starts_with('#')) {
            return Ok(Self::default());
        }
        let yaml = serde_yaml::Deserializer::from_str(text);
        serde_path_to_error::deserialize(yaml).map_err(|error| format!("{}: {}", error.path(), error.inner()))
    }

    /// True when something in it can tell of VMs.
    #[must_use]
    pub fn has_records(&self) -> bool {
        #[cfg(feature = "kubevirt")]
        if self.kubevirt.is_some() {
            return true;
        }
        self.records.is_some() || self.api.is_some()
    }

    /// True where ports in other namespaces are to come: with KubeVirt each VM brings one.
    #[must_use]
    pub fn expects_namespaces(&self) -> bool {
        #[cfg(feature = "kubevirt")]
        return self.kubevirt.is_some();
        #[cfg(not(feature = "kubevirt"))]
        false
    }

    /// `api`, or its defaults.
    #[must_use]
    pub fn api(&self) -> ApiConfig {
        self.api.clone().unwrap_or_default()
    }

    /// Octets of memory for all records: `record_memory`, or what the control group leaves.
    #[must_use]
    pub fn record_octets(&self) -> usize {
        self.record_memory.unwrap_or_else(|| room::within(room::cgroup::memory_limit(), self.workers))
    }

    /// What a record may hold.
    #[must_use]
    pub fn record_limits(&self) -> record::Limits {
        let MetadataLimits { keys, chars } = self.metadata;
        record::Limits { metadata_keys: keys, metadata_chars: chars, ..record::Limits::DEFAULT }
    }

    /// The next hops for which ARP is answered: those configured, or what `addresses` calls for.
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

    /// Checks what no type can.
    ///
    /// # Errors
    /// A value is out of its range; the error names the field.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let value =
            |field, expected: String, found: String| Err(ConfigError::Value { field, expected, found });
        if self.hub.is_empty() || self.hub.len() > HUB_PREFIX_MAX || !self.hub.bytes().all(is_ifname_byte) {
            return value(
                "hub",
                format!("1 to {HUB_PREFIX_MAX} letters, digits, `-`, `_` or `.`"),
                self.hub.clone(),
            );
        }
        if let Some(log) = &self.log
            && let Err(error) = EnvFilter::try_new(log)
        {
            return value(
                "log",
                "a level, or a filter of the tracing crate".into(),
                format!("`{log}`: {error}"),
            );
        }
        self.validate_addresses()?;
        if self.limits.frames_per_second > 0 && self.limits.burst == 0 {
            return value("limits.burst", "at least 1 when frames_per_second is set".into(), "0".into());
        }
        if self.limits.connections_per_second > 0 && self.limits.connection_burst == 0 {
            let wanted = "at least 1 when connections_per_second is set";
            return value("limits.connection_burst", wanted.into(), "0".into());
        }
        let record::Limits { metadata_keys: keys, metadata_chars: chars, .. } = self.record_limits();
        for (field, found, most) in [
            ("metadata.keys", keys, record::Limits::METADATA_KEYS_MOST),
            ("metadata.chars", chars, record::Limits::METADATA_CHARS_MOST),
        ] {
            if found > most {
                return value(field, format!("at most {most}"), found.to_string());
            }
        }
        if let Some(found) = self.record_memory.filter(|octets| *octets < room::LEAST_OCTETS) {
            let least = format!("at least {} octets", room::LEAST_OCTETS);
            return value("record_memory", least, found.to_string());
        }
        let instances = self.api().instances;
        if !(1..=MAX_RECORDS).contains(&instances) {
            return value("api.instances", format!("1 to {MAX_RECORDS}"), instances.to_string());
        }
        Ok(())
    }
}

impl Config {
    fn validate_addresses(&self) -> Result<(), ConfigError> {
        let value = |field, expected: &str, found: String| {
            Err(ConfigError::Value { field, expected: expected.into(), found })
        };
        if self.addresses.is_empty() {
            return value("addresses", "at least one address to serve", "none".into());
        }
        let next_hops: Vec<_> = self.next_hops().into_iter().map(IpAddr::V4).collect();
        let mut seen: Vec<IpAddr> = Vec::new();
        for (field, list) in [("addresses", &self.addresses), ("arp_only", &next_hops)] {
            for address in list {
                // Guests use these among themselves: to take them would cut them off.
                let group = matches!(address, IpAddr::V4(v4) if v4.is_broadcast()) || address.is_multicast();
                if group || address.is_unspecified() || address.is_loopback() {
                    return value(field, "addresses of one station", address.to_string());
                }
                if seen.contains(address) {
                    return value(field, "each address once, served or next hop", format!("{address} twice"));
                }
                seen.push(*address);
            }
        }
        for family in [IpAddr::is_ipv4, IpAddr::is_ipv6] {
            let count = seen.iter().filter(|address| family(address)).count();
            if count > maps::MAX_SERVED as usize {
                let expected = format!("at most {} of a family, next hops included", maps::MAX_SERVED);
                return value("addresses", &expected, count.to_string());
            }
        }
        Ok(())
    }
}

fn is_ifname_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.')
}

impl FromStr for PortSpec {
    type Err = String;

    /// Reads `IFNAME[@NETNS][=MAC]`, the form of the command line.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (port, mac) = match text.split_once('=') {
            Some((port, mac)) => (port, Some(mac.parse::<Mac>().map_err(|e| e.to_string())?)),
            None => (text, None),
        };
        let (ifname, netns) = match port.split_once('@') {
            Some((ifname, netns)) => (ifname, Some(netns.to_owned())),
            None => (port, None),
        };
        Self::checked(ifname.to_owned(), netns, mac)
    }
}

impl PortSpec {
    fn checked(ifname: String, netns: Option<String>, mac: Option<Mac>) -> Result<Self, String> {
        if !is_ifname(&ifname) {
            return Err(format!("expected an interface name of 1 to {MAX_IFNAME} octets, found `{ifname}`"));
        }
        if netns.as_deref() == Some("") {
            return Err("expected a namespace after `@`: a name under /run/netns or an absolute path".into());
        }
        if let Some(mac) = mac.filter(|mac| mac.is_group()) {
            return Err(format!("{mac} is a group address; a guest's own MAC has an even first octet"));
        }
        Ok(Self { name: PortName { ifname, netns }, mac })
    }
}

impl<'de> Deserialize<'de> for PortSpec {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Raw {
            ifname: String,
            netns: Option<String>,
            mac: Option<String>,
        }
        let raw = Raw::deserialize(deserializer)?;
        let mac = raw.mac.map(|mac| mac.parse::<Mac>()).transpose().map_err(serde::de::Error::custom)?;
        Self::checked(raw.ifname, raw.netns, mac).map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_the_configuration_name_modes_of_the_sandbox() {
        use metadata_datapath::sandbox::Mode;
        for (text, mode) in [("on", Mode::On), ("log", Mode::Log), ("off", Mode::Off)] {
            let config: Config = serde_yaml::from_str(&format!("sandbox: {text}")).expect(text);
            assert_eq!(Mode::from(config.sandbox), mode);
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
    fn workers_are_as_many_as_there_may_be_hubs() {
        let cases =
            [("1", Some(1)), ("32", Some(32)), ("0", None), ("33", None), ("-1", None), ("many", None)];
        for (text, expected) in cases {
            assert_eq!(workers(text).ok(), expected, "{text}");
            let config = Config::parse(&format!("workers: {text}\n"));
            assert_eq!(config.ok().map(|config| config.workers), expected, "{text}");
        }
    }

    #[test]
    fn record_memory_is_octets_with_or_without_a_unit() {
        for (text, octets) in [
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
            assert_eq!(config.ok().map(|config| config.record_memory), octets, "{text}");
        }
    }

    #[test]
    fn pins_can_be_turned_off_in_the_file() {
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
    fn a_file_names_only_what_differs() {
        let config =
            Config::parse("limits: {burst: 7}\nports: [{ifname: t0, mac: '52:54:00:00:00:01'}]\n").unwrap();
        assert_eq!(config.limits, Limits { burst: 7, ..Limits::default() });
        assert_eq!(config.ports, ["t0=52:54:00:00:00:01".parse().unwrap()]);
    }

    #[test]
    fn addresses_in_the_file_replace_the_default_and_bring_their_next_hop() {
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
    fn the_policy_for_custom_keys_is_the_records_limit() {
        for (text, keys, chars) in [("hub: x\n", 16, 256), ("metadata: {keys: 64}\n", 64, 256)] {
            let config = Config::parse(text).expect(text);
            config.validate().expect(text);
            let limits = config.record_limits();
            assert_eq!((limits.metadata_keys, limits.metadata_chars), (keys, chars), "{text}");
        }
    }

    #[test]
    fn refusals_name_field_and_line() {
        let cases = [
            ("hub: x\nlimit: {}\n", "line 2", "limit"),
            ("hub: x\nsteer: tc\n", "line 2", "steer"),
            ("limits:\n  burst: -1\n", "line 2", "limits.burst"),
            ("ports:\n- {ifname: a-name-that-is-too-long}\n", "line 2", "ports[0]"),
            ("ports:\n- {ifname: t0, mac: '53:54:00:00:00:01'}\n", "line 2", "group address"),
        ];
        for (text, line, field) in cases {
            let error = Config::parse(text).expect_err(text);
            assert!(error.contains(line) && error.contains(field), "{text:?} gave: {error}");
        }
    }

    #[test]
    fn values_out_of_range_are_refused() {
        type Spoil = fn(&mut Config);
        let cases: [(&str, Spoil); 16] = [
            ("record_memory", |c| c.record_memory = Some(1 << 20)),
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
            ("metadata.keys", |c| c.metadata.keys = 257),
            ("metadata.chars", |c| c.metadata.chars = 4097),
            ("api.instances", |c| c.api = Some(ApiConfig { instances: 0, ..ApiConfig::default() })),
            ("api.instances", |c| c.api = Some(ApiConfig { instances: 16_385, ..ApiConfig::default() })),
        ];
        for (field, spoil) in cases {
            let mut config = Config::default();
            spoil(&mut config);
            let error = config.validate().expect_err(field).to_string();
            assert!(error.starts_with(field), "{error}");
        }
    }

    #[test]
    fn a_port_is_named_by_interface_namespace_and_mac() {
        let cases = [
            ("tap0", None, None),
            ("tap0=52:54:00:12:34:56", None, Some("52:54:00:12:34:56")),
            ("tap0@blue", Some("blue"), None),
            ("tap0@/proc/42/ns/net=52:54:00:12:34:56", Some("/proc/42/ns/net"), Some("52:54:00:12:34:56")),
        ];
        for (text, netns, mac) in cases {
            let spec: PortSpec = text.parse().expect(text);
            assert_eq!(spec.name, PortName { ifname: "tap0".into(), netns: netns.map(Into::into) }, "{text}");
            assert_eq!(spec.mac, mac.map(|m| m.parse().unwrap()), "{text}");
        }
    }

    #[test]
    fn a_malformed_port_is_refused() {
        for text in
            ["", "=52:54:00:12:34:56", "tap0=", "tap0@", "a/b", "tap0=ff:ff:ff:ff:ff:ff", "sixteen-letters-"]
        {
            assert!(text.parse::<PortSpec>().is_err(), "{text} was taken");
        }
    }
}
