//! The options of `xdp-imds doctor`.

use super::Question;
use crate::verbs::options::Options;

/// What the exit codes mean.
pub const EXIT: &str = "\
One line a check: `ok`, `warn` (it works, but not as well as it might, or was not found out) or
`FAIL` (serving would fail, at once or for one port), with what was found, what was expected and
what to do.

Exit code: 0 when nothing failed, 1 when something did, 2 when the options are wrong.";

/// The options of `xdp-imds doctor`.
#[derive(clap::Args, Debug)]
pub struct Arguments {
    #[command(flatten)]
    options: Options,
    /// Write one JSON document instead of lines.
    #[arg(long)]
    json: bool,
}

impl Arguments {
    /// What they ask.
    #[must_use]
    pub fn question(self) -> Question {
        let file = self.options.file().map(Into::into);
        let config = self.options.config().and_then(|config| config.validate().map(|()| config));
        Question { config: config.map_err(|error| error.to_string()), file, json: self.json }
    }
}
