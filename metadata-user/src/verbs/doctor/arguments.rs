//! The command line of `xdp-imds doctor`.

use super::Question;
use crate::verbs::options::Options;

/// The text after the options in `doctor --help`. It explains the printed lines.
pub const LINES: &str = "\
Without options it checks /etc/xdp-imds/config.yaml, which the packages and manifests install, if there is one.

Each line shows the result of one check and the state found:
  ok    no problem
  warn  serving works with a restriction, or the result is unknown
  FAIL  serving would fail, at the start or for one port
A line with a problem also shows the state expected and the remedy. Warnings do not change the exit code.";

/// The options of `xdp-imds doctor`.
#[derive(clap::Args, Debug)]
pub struct Arguments {
    #[command(flatten)]
    options: Options,
    /// Print one JSON document, of the form `doctor/1`.
    #[arg(long)]
    json: bool,
}

impl Arguments {
    /// Reads and validates the configuration.
    #[must_use]
    pub fn question(self) -> Question {
        let options = self.options.or_default_file();
        let file = options.file().map(Into::into);
        let config = options.config().and_then(|config| config.validate().map(|()| config));
        Question { config: config.map_err(|error| error.to_string()), file, json: self.json }
    }
}
