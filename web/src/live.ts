// Requests of the live page.

export interface Live {
  token: string;
}
