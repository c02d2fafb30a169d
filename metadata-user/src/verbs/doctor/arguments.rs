//! The options of `xdp-imds doctor`.

use super::Question;
use crate::verbs::options::Options;

/// The meaning of the lines and exit codes.
pub const EXIT: &str = "\
Each line is one check: `ok`, `warn` (serving works with a restriction, or the result is unknown)
or `FAIL` (serving would fail, at the start or for one port), with the state found, the state
expected and the remedy.

Exit codes: 0 no check failed, 1 a check failed, 2 wrong options.";

/// The options of `xdp-imds doctor`.
#[derive(clap::Args, Debug)]
pub struct Arguments {
    #[command(flatten)]
    options: Options,
    /// Print one JSON document instead of lines.
    #[arg(long)]
    json: bool,
}

impl Arguments {
    /// Returns the input of the checks.
    #[must_use]
    pub fn question(self) -> Question {
        let file = self.options.file().map(Into::into);
        let config = self.options.config().and_then(|config| config.validate().map(|()| config));
        Question { config: config.map_err(|error| error.to_string()), file, json: self.json }
    }
}
