//! On SIGHUP the agent reads the configuration and the records directory again, and applies the fields that can change
//! while guests are served.
//!
//! An unusable configuration changes nothing. Fields that need a restart or a takeover ([`RESTART`]) are not applied;
//! the log lists them.

use anyhow::Context as _;
use tracing::{error, info, warn};

use crate::config::Config;

/// The source of the configuration, and a callback for changes of it.
pub struct ConfigSource {
    /// Reads the configuration, with the arguments of the command line.
    pub read: Box<dyn Fn() -> anyhow::Result<Config>>,
    /// Called with a configuration once it is in force.
    pub applied: Box<dyn Fn(&Config)>,
}

impl ConfigSource {
    /// A configuration that never changes.
    #[must_use]
    pub fn fixed(config: &Config) -> Self {
        let config = config.clone();
        Self { read: Box::new(move || Ok(config.clone())), applied: Box::new(|_| {}) }
    }
}

/// The difference between two configurations.
#[derive(Debug, PartialEq)]
pub(super) struct ConfigChanges {
    /// The configuration to apply now: new fields where they can change, old fields elsewhere.
    pub(super) now: Config,
    /// Fields that differ and need a restart.
    pub(super) later: Vec<&'static str>,
}

/// The name of a field that only a restart applies, and a function that returns true if the field differs.
type Field = (&'static str, fn(&Config, &Config) -> bool);

/// Fields that only a restart applies: the kernel's tables, the hubs and the workers depend on them.
const RESTART: [Field; 19] = [
    ("api", |a, b| a.api != b.api),
    ("audit", |a, b| a.audit != b.audit),
    ("identity", |a, b| a.identity != b.identity),
    ("addresses", |a, b| a.addresses != b.addresses),
    ("arp_only", |a, b| a.next_hops() != b.next_hops()),
    ("steer", |a, b| a.steer != b.steer),
    ("guard", |a, b| a.guard != b.guard),
    ("hub", |a, b| a.hub != b.hub),
    ("metrics", |a, b| a.metrics != b.metrics),
    ("page", |a, b| a.page != b.page),
    ("page_hosts", |a, b| a.page_hosts != b.page_hosts),
    ("state", |a, b| a.state != b.state),
    ("token_key", |a, b| a.token_key != b.token_key),
    ("pins", |a, b| a.pins != b.pins),
    ("run", |a, b| a.run != b.run),
    ("proxmox", |a, b| a.proxmox != b.proxmox),
    ("workers", |a, b| a.workers != b.workers),
    ("spin_us", |a, b| a.spin_us != b.spin_us),
    ("answer_in_kernel", |a, b| a.answer_in_kernel != b.answer_in_kernel),
];

impl ConfigChanges {
    /// Compares the configuration in force with one that was read.
    pub(super) fn between(old: &Config, new: Config) -> Self {
        let now = Config {
            records: new.records.clone(),
            metadata: new.metadata,
            ports: new.ports.clone(),
            rotate_token_key_days: new.rotate_token_key_days,
            limits: new.limits,
            drain_seconds: new.drain_seconds,
            log: new.log.clone(),
            log_format: new.log_format,
            ..old.clone()
        };
        let mut later: Vec<_> =
            RESTART.iter().filter(|(_, differs)| differs(old, &new)).map(|(name, _)| *name).collect();
        if later.is_empty() && now != new {
            later.push("other fields");
        }
        Self { now, later }
    }
}

/// Reads the configuration again.
///
/// # Errors
/// The new configuration cannot be used. The reason is also logged.
pub(super) fn read(origin: &ConfigSource, old: &Config) -> Result<ConfigChanges, String> {
    let usable = || {
        let new = (origin.read)()?;
        if let Some(records) = &new.records {
            std::fs::read_dir(records).with_context(|| format!("reading {}", records.display()))?;
        }
        anyhow::Ok(new)
    };
    match usable() {
        Ok(new) => {
            let changes = ConfigChanges::between(old, new);
            if changes.later.is_empty() {
                info!("configuration reloaded");
            } else {
                let fields = changes.later.join(", ");
                let keep =
                    if changes.later.len() == 1 { "keeps its old value" } else { "keep their old values" };
                warn!("configuration reloaded; {fields} {keep} until the agent is restarted");
            }
            Ok(changes)
        }
        Err(error) => {
            error!("the configuration stays as it was: {error:#}");
            Err(format!("{error:#}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{ConfigChanges, ConfigSource, RESTART, read};
    use crate::config::Config;
    use crate::logging::LogFormat;

    #[test]
    fn fields_that_can_change_are_applied_and_the_others_are_named() {
        type Case = (&'static str, fn(&mut Config), bool);
        let cases: [Case; 18] = [
            ("nothing", |_| {}, true),
            ("records", |c| c.records = Some("/elsewhere".into()), true),
            ("metadata", |c| c.metadata.keys = 1, true),
            ("ports", |c| c.ports = vec!["tap0".parse().expect("a port")], true),
            ("drain_seconds", |c| c.drain_seconds = 1, true),
            ("rotate_token_key_days", |c| c.rotate_token_key_days = 1, true),
            ("log", |c| c.log = Some("debug".into()), true),
            ("log_format", |c| c.log_format = LogFormat::Json, true),
            ("addresses", |c| _ = c.addresses.pop(), false),
            ("limits", |c| c.limits.burst = 1, true),
            ("state", |c| c.state = None, false),
            ("proxmox", |c| c.proxmox = Some(Default::default()), false),
            ("workers", |c| c.workers = 2, false),
            ("run", |c| c.run = "/elsewhere".into(), false),
            ("metrics", |c| c.metrics = Some("127.0.0.1:9".parse().expect("an address")), false),
            ("page_hosts", |c| c.page_hosts = vec!["node".into()], false),
            ("spin_us", |c| c.spin_us += 1, false),
            ("api", |c| c.api = Some(Default::default()), false),
        ];
        for (field, change, at_once) in cases {
            let (old, mut new) = (Config::default(), Config::default());
            change(&mut new);
            let ConfigChanges { now, later } = ConfigChanges::between(&old, new.clone());
            assert_eq!(now == new, at_once, "{field}");
            assert_eq!(later, if at_once { vec![] } else { vec![field] });
            if !at_once {
                assert_eq!(now, old, "{field}");
            }
        }
        assert!(RESTART.iter().all(|(_, differs)| !differs(&Config::default(), &Config::default())));
    }

    #[test]
    fn an_unusable_configuration_changes_nothing() {
        let old = Config::default();
        let refused = ConfigSource { read: Box::new(|| anyhow::bail!("no")), ..ConfigSource::fixed(&old) };
        assert_eq!(read(&refused, &old), Err("no".to_owned()));
        let nowhere = Config { records: Some("/does/not/exist".into()), ..old.clone() };
        assert!(
            read(&ConfigSource::fixed(&nowhere), &old).is_err_and(|error| error.contains("/does/not/exist"))
        );
        assert!(read(&ConfigSource::fixed(&old), &old).is_ok());
    }
}
