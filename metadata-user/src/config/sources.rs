//! The sources of records that a configuration turns on.

use std::sync::Arc;

use metadata_content::source::RecordSource;
use metadata_feed::directory::RecordDirectory;
#[cfg(feature = "kubevirt")]
use metadata_feed::kubevirt::KubevirtSource;
use metadata_feed::libvirt::HookDirectory;
use metadata_feed::openstack::OpenstackSource;
use metadata_feed::proxmox::ProxmoxSource;
use metadata_feed::source::Source;

use super::Config;

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
    use super::Config;
    use metadata_content::source::RecordSource;

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
