//! Validation of limits that the types of the fields cannot express.

use std::net::IpAddr;

use metadata_common::maps;

use metadata_content::record;
use metadata_feed::memory_budget;
use metadata_feed::registry::MAX_RECORDS;
use metadata_steer::HUB_PREFIX_MAX;

use super::{Config, ConfigError, PAGE_HOSTS};
use crate::logging::LogFilter;

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
            return value("log", expected.into(), format!("`{log}`: {error}"));
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
        self.validate_addresses()?;
        if let Some(identity) = &self.identity {
            identity.validate()?;
        }
        if self.limits.frames_per_second > 0 && self.limits.burst == 0 {
            return value("limits.burst", "at least 1 when frames_per_second is set".into(), "0".into());
        }
        if self.limits.connections_per_second > 0 && self.limits.connection_burst == 0 {
            let wanted = "at least 1 when connections_per_second is set";
            return value("limits.connection_burst", wanted.into(), "0".into());
        }
        let record::RecordLimits { metadata_keys: keys, metadata_chars: chars, .. } = self.record_limits();
        for (field, found, most) in [
            ("metadata.keys", keys, record::RecordLimits::METADATA_KEYS_MOST),
            ("metadata.chars", chars, record::RecordLimits::METADATA_CHARS_MOST),
        ] {
            if found > most {
                return value(field, format!("at most {most}"), found.to_string());
            }
        }
        if let Some(found) = self.record_memory.filter(|bytes| *bytes < memory_budget::LEAST_BYTES) {
            let least = format!("at least {} bytes", memory_budget::LEAST_BYTES);
            return value("record_memory", least, found.to_string());
        }
        let instances = self.api().instances;
        if !(1..=MAX_RECORDS).contains(&instances) {
            return value("api.instances", format!("1 to {MAX_RECORDS}"), instances.to_string());
        }
        Ok(())
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
