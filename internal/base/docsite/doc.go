// Package docsite makes a site of HTML files from the repository's Markdown and its pictures, and serves it below /docs or writes it to
// a directory. The site needs no network: its index of words is one of its files, and pages read without scripts, too.
// Links between files are relative, so that the same bytes work at a server and on a disk.
//
// It does not check links: a link to a file that is not part of the site becomes text. Its tests check them all.
package docsite
