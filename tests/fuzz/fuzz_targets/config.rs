//! Laws of the configuration parser, which hold for every text.
//!
//! The fuzz target and the test that replays its corpus share this file.
#![cfg_attr(not(test), no_main)]

use std::io::Write as _;
use std::path::Path;

use metadata_common::maps;
use metadata_common::port::is_ifname;
use metadata_content::record::RecordLimits;
use metadata_user::config::{Config, ConfigError};
use tempfile::NamedTempFile;

/// Longest text tried, in bytes; a real configuration has a page.
const LONGEST: usize = 16 << 10;
/// Longest error message in bytes, beyond the input it may quote.
const MESSAGE_MOST: usize = 4 << 10;
/// A directory where writing needs no disk.
const IN_MEMORY: &str = "/dev/shm";

/// Asserts every law on one text.
///
/// # Panics
/// If a law is broken; the message says which.
pub(crate) fn assert_all(input: &[u8]) {
    if input.len() > LONGEST {
        return;
    }
    let base = Path::new(IN_MEMORY);
    let base = if base.is_dir() { base.to_owned() } else { std::env::temp_dir() };
    let mut file = NamedTempFile::new_in(base).expect("a file");
    file.write_all(input).expect("it is written");
    let read = || Config::read(file.path());
    match read() {
        Ok(config) => {
            in_range(&config);
            assert_eq!(read().ok(), Some(config), "one text parses to two configurations");
        }
        Err(error) => {
            let message = error.to_string();
            let name = file.path().display().to_string();
            assert!(message.contains(&name), "the error does not name the file: {message}");
            let read = matches!(error, ConfigError::Read { .. });
            assert_eq!(read, std::str::from_utf8(input).is_err(), "{message}");
            assert!(message.len() <= MESSAGE_MOST + input.len(), "{} bytes of message", message.len());
        }
    }
}

/// Asserts what the rest of the agent relies on.
fn in_range(config: &Config) {
    config.validate().expect("what was read is valid");
    assert!((1..=maps::MAX_HUBS).contains(&config.workers), "{} workers", config.workers);
    assert!(!config.addresses.is_empty());
    for family in [true, false] {
        let next_hops = if family { config.next_hops().len() } else { 0 };
        let count = config.addresses.iter().filter(|address| address.is_ipv4() == family).count();
        assert!(
            count + next_hops <= maps::MAX_SERVED as usize,
            "{count} addresses and {next_hops} next hops"
        );
    }
    for port in &config.ports {
        assert!(is_ifname(&port.name.ifname), "{port:?}");
        assert_ne!(port.name.netns.as_deref(), Some(""));
        assert!(port.mac.is_none_or(|mac| !mac.is_group()), "{port:?}");
    }
    // A hub's longest device name is four bytes longer than `hub`.
    assert!(is_ifname(&format!("{}-o63", config.hub)), "{}", config.hub);
    let limits = config.record_limits();
    assert!(limits.metadata_keys <= RecordLimits::METADATA_KEYS_MOST);
    assert!(limits.metadata_chars <= RecordLimits::METADATA_CHARS_MOST);
}

#[cfg(not(test))]
libfuzzer_sys::fuzz_target!(|input: &[u8]| assert_all(input));
