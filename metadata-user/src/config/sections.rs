//! The sections whose types belong to this crate. The crates that use the other sections define their types.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use metadata_common::maps;
use metadata_content::record;
#[cfg(feature = "kubevirt")]
use metadata_content::record::ServeLimits;
use metadata_content::source::RecordSource;
use metadata_datapath::sandbox;
use metadata_feed::directory::RecordDirectory;
#[cfg(feature = "kubevirt")]
use metadata_feed::kubevirt::KubevirtSource;
use metadata_feed::libvirt::HookDirectory;
use metadata_feed::memory_budget::{self, WORKER_BYTES, cgroup};
use metadata_feed::openstack::{OpenstackOptions, OpenstackSource};
use metadata_feed::proxmox::ProxmoxSource;
use metadata_feed::registry::MAX_RECORDS;
use metadata_feed::source::Source;
use metadata_signer::jwt::{LIFETIME_LEAST, LIFETIME_MOST};
use metadata_signer::{Algorithm, CertificateFiles};
use metadata_steer::{HUB_PREFIX_MAX, PortLimits};
use serde::{Deserialize, Serialize};

use super::{Config, ConfigError, DRAIN_SECONDS_MOST, PAGE_HOSTS, ROTATE_DAYS_MOST, SPIN_US_MOST};
use crate::logging::LogFilter;
use crate::service::audit::AuditConfig;

/// How the kernel treats system calls and capabilities that serving does not need.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize, serde::Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Sandbox {
    /// The system calls fail, and the agent has dropped the capabilities.
    On,
    /// System calls and capabilities stay available. The kernel logs each call that `on` refuses (audit type 1326).
    Log,
    /// No filter is installed, and the agent keeps its capabilities.
    Off,
}

impl Sandbox {
    /// Returns the word for it in the configuration and on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::On => "on",
            Self::Log => "log",
            Self::Off => "off",
        }
    }
}

impl From<Sandbox> for sandbox::SandboxMode {
    fn from(word: Sandbox) -> Self {
        match word {
            Sandbox::On => Self::On,
            Sandbox::Log => Self::Log,
            Sandbox::Off => Self::Off,
        }
    }
}

/// `metadata`: limits of custom keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct MetadataLimits {
    /// Maximum number of keys of one VM: 16 by default, at most [`record::RecordLimits::METADATA_KEYS_MOST`].
    pub keys: usize,
    /// Maximum length of one key or value, in characters: 256 by default, at most
    /// [`record::RecordLimits::METADATA_CHARS_MOST`].
    pub chars: usize,
}

impl Default for MetadataLimits {
    fn default() -> Self {
        let record::RecordLimits { metadata_keys, metadata_chars, .. } = record::RecordLimits::DEFAULT;
        Self { keys: metadata_keys, chars: metadata_chars }
    }
}

/// `api`: who may register VMs, and how many.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct ApiConfig {
    /// A group, by its name in `/etc/group` or its number, that may use the control socket. The access
    /// control lists of the run directory and the socket then name it. Members control the metadata of all guests.
    /// Default: none; only the agent's user and root have access.
    pub group: Option<String>,
    /// Maximum number of registered VMs: [`MAX_RECORDS`] by default, which is also the largest value.
    pub instances: usize,
}

impl Default for ApiConfig {
    fn default() -> Self {
        Self { group: None, instances: MAX_RECORDS }
    }
}

/// `identity`: tokens by which others recognise a VM.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct IdentityConfig {
    /// URL of the issuer, `iss` of tokens. Verifiers fetch its public keys below this URL, which begins with
    /// `https://`.
    pub issuer: String,
    /// Directory of private keys: files `*.pem` with mode 0600, in PKCS#8. Only the signer, a process of its own, reads
    /// it.
    pub keys: PathBuf,
    /// Trust domain of SPIFFE. With it the subject of a token is a SPIFFE ID, and the token is a JWT-SVID. Default:
    /// none.
    #[serde(default)]
    pub trust_domain: Option<String>,
    /// Algorithm of the keys; `ES256` by default.
    #[serde(default)]
    pub algorithm: Algorithm,
    /// URL of the public keys; `/.well-known/jwks.json` below `issuer` by default.
    #[serde(default)]
    pub jwks_uri: Option<String>,
    /// Lifetime of tokens in seconds, 10 to 3600; 3600 by default.
    #[serde(default = "lifetime_seconds")]
    pub lifetime_seconds: u32,
    /// Age in hours at which a key begins to sign, so that verifiers know it by then: 0 to 720, 24 by default. A key's
    /// age counts from the time in its file name (`20261123T100000Z.pem`), else from the file's modification time.
    #[serde(default = "publish_hours")]
    pub publish_hours: u32,
    /// Age in days of the newest key at which the signer makes another; 0 (default) leaves keys to others.
    #[serde(default)]
    pub rotate_days: u32,
    /// The certificate that signs documents in the form of EC2 and Azure. Default: none, and no such documents.
    #[serde(default)]
    pub certificate: Option<CertificateFiles>,
}

const fn lifetime_seconds() -> u32 {
    LIFETIME_MOST
}

const fn publish_hours() -> u32 {
    24
}

impl IdentityConfig {
    /// Returns the URL of the public keys.
    #[must_use]
    pub fn jwks_uri(&self) -> String {
        let default = || format!("{}/.well-known/jwks.json", self.issuer.trim_end_matches('/'));
        self.jwks_uri.clone().unwrap_or_else(default)
    }
}

/// Maximum length of an issuer or a URL of keys, in bytes.
const URL_BYTES: usize = 255;
/// Maximum length of a trust domain, in bytes (SPIFFE ID section 2.3).
const TRUST_DOMAIN_BYTES: usize = 255;
/// Longest time that a key may be published before it signs, in hours.
const PUBLISH_HOURS_MOST: u32 = 720;

/// Returns whether the text is an `https` URL without user, query and fragment (OpenID Connect Discovery 1.0 section
/// 3).
fn is_url(text: &str) -> bool {
    let Some(rest) = text.strip_prefix("https://") else { return false };
    let host = rest.split('/').next().unwrap_or_default();
    let is_good = |byte: u8| byte.is_ascii_graphic() && !b"\"#<>?@\\^`{|}".contains(&byte);
    text.len() <= URL_BYTES && !host.is_empty() && text.bytes().all(is_good)
}

fn is_trust_domain(text: &str) -> bool {
    let is_good = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-._".contains(&byte);
    (1..=TRUST_DOMAIN_BYTES).contains(&text.len()) && text.bytes().all(is_good)
}

impl IdentityConfig {
    /// Validates ranges and combinations of values.
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        let value = |field, expected: &str, found: String| {
            Err(ConfigError::Value { field, expected: expected.into(), found })
        };
        let url = "a URL of at most 255 characters that begins with https:// and has no query";
        if !is_url(&self.issuer) {
            return value("identity.issuer", url, format!("`{}`", self.issuer));
        }
        if let Some(found) = self.jwks_uri.as_ref().filter(|uri| !is_url(uri)) {
            return value("identity.jwks_uri", url, format!("`{found}`"));
        }
        if self.keys == Path::new("") {
            return value("identity.keys", "a directory", "an empty text".into());
        }
        if let Some(found) = self.trust_domain.as_ref().filter(|domain| !is_trust_domain(domain)) {
            let expected = "1 to 255 lower-case letters, digits, `-`, `.` and `_`";
            return value("identity.trust_domain", expected, format!("`{found}`"));
        }
        if let Some(CertificateFiles { chain, key }) = &self.certificate
            && [chain, key].contains(&&PathBuf::new())
        {
            return value(
                "identity.certificate",
                "`chain` and `key` with a file each",
                "an empty text".into(),
            );
        }
        if !(LIFETIME_LEAST..=LIFETIME_MOST).contains(&self.lifetime_seconds) {
            let expected = format!("{LIFETIME_LEAST} to {LIFETIME_MOST}");
            return value("identity.lifetime_seconds", &expected, self.lifetime_seconds.to_string());
        }
        if self.publish_hours > PUBLISH_HOURS_MOST {
            let expected = format!("at most {PUBLISH_HOURS_MOST}");
            return value("identity.publish_hours", &expected, self.publish_hours.to_string());
        }
        self.validate_rotation()
    }

    fn validate_rotation(&self) -> Result<(), ConfigError> {
        let value = |expected: String, found: String| {
            Err(ConfigError::Value { field: "identity.rotate_days", expected, found })
        };
        let days = self.rotate_days;
        if days == 0 {
            return Ok(());
        }
        if self.algorithm == Algorithm::Rs256 {
            let expected = "0 with RS256, whose keys others make";
            return value(expected.into(), days.to_string());
        }
        // The next key must sign for longer than a token of the last one lives.
        let least = (self.publish_hours + 1).div_ceil(24).max(1);
        if !(least..=ROTATE_DAYS_MOST).contains(&days) {
            let expected = format!("0, or {least} to {ROTATE_DAYS_MOST} with this `publish_hours`");
            return value(expected, days.to_string());
        }
        Ok(())
    }
}

impl Config {
    /// Validates ranges and combinations of values.
    ///
    /// # Errors
    /// A value is out of range. The error names the first such field.
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
            && let Err(error) = log.parse::<LogFilter>()
        {
            let expected = "a level such as `info`, or levels such as `info,metadata_steer=debug`";
            return value("log", expected.into(), error);
        }
        if self.page_hosts.len() > PAGE_HOSTS {
            return value(
                "page_hosts",
                format!("at most {PAGE_HOSTS} names"),
                self.page_hosts.len().to_string(),
            );
        }
        if let Some(name) = self.page_hosts.iter().find(|name| !is_host_name(name)) {
            return value("page_hosts", "host names without a port".into(), format!("`{name}`"));
        }
        self.validate_ports()?;
        self.validate_addresses()?;
        if let Some(identity) = &self.identity {
            identity.validate()?;
        }
        if let Some((field, expected)) = self.openstack.as_ref().and_then(OpenstackOptions::conflict) {
            return value(field, expected.into(), "a value".into());
        }
        if self.limits.frames_per_second > 0 && self.limits.burst == 0 {
            return value("limits.burst", "at least 1 when frames_per_second is set".into(), "0".into());
        }
        if self.limits.connections_per_second > 0 && self.limits.connection_burst == 0 {
            let wanted = "at least 1 when connections_per_second is set";
            return value("limits.connection_burst", wanted.into(), "0".into());
        }
        self.validate_numbers()
    }

    /// Validates the numbers that have a range of their own.
    fn validate_numbers(&self) -> Result<(), ConfigError> {
        type Row = (&'static str, u64, RangeInclusive<u64>);
        let row = |field, found: u32, least: u32, most: u32| -> Row {
            (field, found.into(), least.into()..=most.into())
        };
        let size = |field, found: usize, least: usize, most: usize| -> Row {
            (field, found as u64, least as u64..=most as u64)
        };
        let PortLimits { frames_per_second, burst, connections_per_second, connection_burst } = self.limits;
        let record_memory = self.record_memory.unwrap_or(memory_budget::LEAST_BYTES);
        let rows = [
            size("record_memory", record_memory, memory_budget::LEAST_BYTES, memory_budget::MOST_BYTES),
            size("api.instances", self.api().instances, 1, MAX_RECORDS),
            size("metadata.keys", self.metadata.keys, 0, record::RecordLimits::METADATA_KEYS_MOST),
            size("metadata.chars", self.metadata.chars, 0, record::RecordLimits::METADATA_CHARS_MOST),
            row("limits.frames_per_second", frames_per_second, 0, PortLimits::RATE_MOST),
            row("limits.burst", burst, 0, PortLimits::RATE_MOST),
            row("limits.connections_per_second", connections_per_second, 0, PortLimits::RATE_MOST),
            row("limits.connection_burst", connection_burst, 0, PortLimits::RATE_MOST),
            row("audit.sample", self.audit.sample, 1, AuditConfig::SAMPLE_MOST),
            row("audit.max_megabytes", self.audit.max_megabytes, 0, AuditConfig::MEGABYTES_MOST),
            row("audit.keep", self.audit.keep, 0, AuditConfig::KEEP_MOST),
            row("drain_seconds", self.drain_seconds, 0, DRAIN_SECONDS_MOST),
            row("rotate_token_key_days", self.rotate_token_key_days, 1, ROTATE_DAYS_MOST),
            row("spin_us", self.spin_us, 0, SPIN_US_MOST),
        ];
        #[cfg(feature = "kubevirt")]
        let rows = rows.into_iter().chain(self.kubevirt.iter().flat_map(|kubevirt| {
            let ServeLimits { burst, rps, conns, user_data } = kubevirt.serve.limits;
            [
                row("kubevirt.serve.limits.burst", burst, 1, ServeLimits::REQUESTS_MOST),
                row("kubevirt.serve.limits.rps", rps, 1, ServeLimits::REQUESTS_MOST),
                row("kubevirt.serve.limits.conns", conns, 1, ServeLimits::CONNECTIONS_MOST),
                row("kubevirt.serve.limits.user_data", user_data, 0, record::USER_DATA_MAX),
            ]
        }));
        match rows.into_iter().find(|(_, found, range)| !range.contains(found)) {
            None => Ok(()),
            Some((field, found, range)) => Err(ConfigError::Value {
                field,
                expected: format!("{} to {}", range.start(), range.end()),
                found: found.to_string(),
            }),
        }
    }

    /// One of two equal entries was meant for another guest, which would get no metadata.
    fn validate_ports(&self) -> Result<(), ConfigError> {
        let mut seen = BTreeSet::new();
        let Some(twice) = self.ports.iter().find(|port| !seen.insert((&port.name, port.mac))) else {
            return Ok(());
        };
        let of_guest = twice.mac.map_or_else(String::new, |mac| format!(" with {mac}"));
        Err(ConfigError::Value {
            field: "ports",
            expected: "each port with each MAC at most once, those of --port included".into(),
            found: format!("{}{of_guest} twice", twice.name),
        })
    }

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
                // Guests send broadcast and multicast frames to each other, so the agent must not intercept them.
                let group = matches!(address, IpAddr::V4(v4) if v4.is_broadcast()) || address.is_multicast();
                if group || address.is_unspecified() || address.is_loopback() {
                    return value(
                        field,
                        "unicast addresses, neither unspecified nor loopback",
                        address.to_string(),
                    );
                }
                if seen.contains(address) {
                    return value(
                        field,
                        "each address at most once in both lists",
                        format!("{address} twice"),
                    );
                }
                seen.push(*address);
            }
        }
        for family in [IpAddr::is_ipv4, IpAddr::is_ipv6] {
            let count = seen.iter().filter(|address| family(address)).count();
            if count > maps::MAX_SERVED as usize {
                let expected = format!("at most {} per address family, next hops included", maps::MAX_SERVED);
                return value("addresses", &expected, count.to_string());
            }
        }
        Ok(())
    }
}

/// True for a name of letters, digits, `-`, `_` and `.`, at most as long as DNS allows (RFC 1035 §2.3.4).
fn is_host_name(name: &str) -> bool {
    (1..=253).contains(&name.len()) && name.bytes().all(is_ifname_byte)
}

fn is_ifname_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.')
}

/// CPUs for which one worker suffices. By a model of a node with 62 VMs on each CPU that all run cloud-init at once
/// (the bench `many_cores`), a worker is then busy for an eighth of the storm.
const CPUS_OF_A_WORKER: usize = 32;
/// The most workers by default. Each takes 64 MiB for the rings of its hub.
const MOST: usize = 8;
/// The share of the memory limit that workers may take: one part of this many.
const PARTS: u64 = 8;

/// The number of workers for the CPUs and the memory that this process may use.
pub(super) fn by_default() -> u32 {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    for_machine(cpus, cgroup::memory_limit())
}

fn for_machine(cpus: usize, memory: Option<u64>) -> u32 {
    let by_cpus = cpus.div_ceil(CPUS_OF_A_WORKER).clamp(1, MOST);
    let by_memory = memory.map_or(u64::MAX, |bytes| bytes / PARTS / WORKER_BYTES as u64);
    (by_cpus as u64).min(by_memory).max(1) as u32
}

// The sources of records that a configuration turns on.

/// Makes a source, if a configuration turns it on.
type MakeSource = fn(&Config) -> Option<Arc<dyn Source>>;

/// All sources whose records a feed brings. The API has none: its requests bring them.
const SOURCES: &[MakeSource] = &[
    |config| Some(Arc::new(RecordDirectory::at(config.records.clone()?))),
    |config| Some(Arc::new(HookDirectory::of(&config.run))),
    |config| Some(Arc::new(ProxmoxSource::new(config.proxmox.clone()?))),
    |config| Some(Arc::new(OpenstackSource::new(config.openstack.clone()?))),
    #[cfg(feature = "kubevirt")]
    |config| Some(Arc::new(KubevirtSource::new(config.kubevirt.clone()?))),
];

impl Config {
    /// Makes the sources of records that are on.
    #[must_use]
    pub fn sources(&self) -> Vec<Arc<dyn Source>> {
        SOURCES.iter().filter_map(|make| make(self)).collect()
    }

    /// Returns whether any source of records is turned on.
    #[must_use]
    pub fn has_records(&self) -> bool {
        self.records.is_some() || !self.platforms().is_empty()
    }

    /// The sources of records, in words.
    #[must_use]
    pub fn source_names(&self) -> Vec<String> {
        let directory = self.records.as_ref().map(|directory| directory.display().to_string());
        directory.into_iter().chain(self.platforms().into_iter().map(str::to_owned)).collect()
    }

    /// The sources that are turned on, in words, but for the directory of records.
    #[must_use]
    pub fn platforms(&self) -> Vec<&'static str> {
        let api = self.api.is_some().then_some(RecordSource::Api);
        let others = self.sources().into_iter().map(|source| source.kind());
        let others = others.filter(|kind| *kind != RecordSource::File && kind.setting().is_some());
        let mut kinds: Vec<_> = api.into_iter().chain(others).collect();
        kinds.sort_unstable();
        kinds.into_iter().map(RecordSource::title).collect()
    }

    /// Returns whether ports in other namespaces are expected.
    #[must_use]
    pub fn expects_namespaces(&self) -> bool {
        self.sources().iter().any(|source| source.is_in_namespaces())
    }
}

#[cfg(test)]
mod tests {
    use metadata_content::source::RecordSource;

    use super::{Config, for_machine};

    fn read(more: &str) -> Result<Config, String> {
        let config =
            Config::parse(&format!("identity: {{keys: /keys, {more}}}\n")).map_err(|e| e.to_string())?;
        config.validate().map_err(|error| error.to_string())?;
        Ok(config)
    }

    #[test]
    fn only_issuer_and_keys_are_required() {
        let config = read("issuer: 'https://imds.example/'").expect("valid");
        let identity = config.identity.expect("an issuer");
        assert_eq!((identity.lifetime_seconds, identity.publish_hours, identity.rotate_days), (3_600, 24, 0));
        assert_eq!(identity.jwks_uri(), "https://imds.example/.well-known/jwks.json");
        assert!(Config::parse("identity: {keys: /keys}\n").is_err());
        assert!(Config::parse("identity: {issuer: 'https://a'}\n").is_err());
    }

    #[test]
    fn values_out_of_range_are_refused_by_field() {
        let good = "issuer: 'https://a'";
        for (field, more) in [
            ("issuer", "issuer: 'http://a'"),
            ("issuer", "issuer: 'https://'"),
            ("issuer", "issuer: 'https://a?b'"),
            ("issuer", "issuer: 'https://user@a'"),
            ("jwks_uri", "issuer: 'https://a', jwks_uri: 'ftp://a'"),
            ("trust_domain", "issuer: 'https://a', trust_domain: 'Example.org'"),
            ("trust_domain", "issuer: 'https://a', trust_domain: ''"),
            ("trust_domain", "issuer: 'https://a', trust_domain: 'a/b'"),
            ("certificate", "issuer: 'https://a', certificate: {chain: c.pem, key: ''}"),
            ("lifetime_seconds", "issuer: 'https://a', lifetime_seconds: 3601"),
            ("lifetime_seconds", "issuer: 'https://a', lifetime_seconds: 9"),
            ("publish_hours", "issuer: 'https://a', publish_hours: 721"),
            ("rotate_days", "issuer: 'https://a', rotate_days: 1"),
            ("rotate_days", "issuer: 'https://a', rotate_days: 30, algorithm: RS256"),
        ] {
            let error = read(more).expect_err(more);
            assert!(error.starts_with(&format!("identity.{field}: expected")), "{more}: {error}");
        }
        for more in [
            "rotate_days: 2",
            "rotate_days: 1, publish_hours: 23",
            "algorithm: EdDSA",
            "trust_domain: a.b-c_d",
            "certificate: {chain: c.pem, key: k.pem}",
        ] {
            read(&format!("{good}, {more}")).expect(more);
        }
    }

    #[test]
    fn workers_follow_the_cpus_within_an_eighth_of_the_memory() {
        const GIB: u64 = 1 << 30;
        for (cpus, memory, workers) in [
            (1, None, 1),
            (32, None, 1),
            (33, None, 2),
            (64, None, 2),
            (128, None, 4),
            (1_024, None, 8),
            (128, Some(GIB / 4), 1),
            (128, Some(3 * GIB / 2), 1),
            (128, Some(3 * GIB), 2),
            (128, Some(16 * GIB), 4),
        ] {
            assert_eq!(for_machine(cpus, memory), workers, "{cpus} CPUs, {memory:?} bytes");
        }
    }

    #[test]
    fn the_sources_of_a_configuration_are_those_it_turns_on() {
        let kinds = |config: &Config| config.sources().iter().map(|source| source.kind()).collect::<Vec<_>>();
        let none = Config::default();
        assert_eq!((kinds(&none), none.has_records()), (vec![RecordSource::Hook], false));
        let all = Config {
            records: Some("/r".into()),
            api: Some(Default::default()),
            proxmox: Some(Default::default()),
            openstack: Some(Default::default()),
            #[cfg(feature = "kubevirt")]
            kubevirt: Some(Default::default()),
            ..none
        };
        let mut found = kinds(&all);
        found.sort_unstable();
        let with_feed = |kind: &RecordSource| {
            *kind != RecordSource::Api && (cfg!(feature = "kubevirt") || *kind != RecordSource::Kubevirt)
        };
        assert_eq!(found, RecordSource::ALL.into_iter().filter(with_feed).collect::<Vec<_>>());
        assert_eq!(all.expects_namespaces(), cfg!(feature = "kubevirt"));
        assert_eq!(all.source_names()[..2], ["/r", "the API"]);
    }
}
